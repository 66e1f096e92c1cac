package io.github.flinkishspark.shim;

import com.codahale.metrics.Gauge;
import com.codahale.metrics.MetricRegistry;
import com.fasterxml.jackson.databind.JsonNode;
import java.util.Iterator;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.atomic.AtomicReference;
import org.apache.spark.SparkEnv;
import org.apache.spark.metrics.source.Source;

/**
 * The metrics of one job in Spark's own metric system, so that Spark's sinks and its Prometheus servlet show them.
 *
 * <p>Values are said by the driver, in Python, when they have changed; a sink reads what was said last. Spark takes sources out
 * again by the beginning of their names, which may be those of other jobs. So a source stays for the life of the JVM, one for
 * each name of a job, and its gauges come and go: Spark follows those of a source's registry.
 */
public final class JobMetrics implements Source {
  private static final Map<String, JobMetrics> BY_JOB = new ConcurrentHashMap<>();

  private final SparkEnv env;
  private final String name;
  private final MetricRegistry registry = new MetricRegistry();
  private final Map<String, AtomicReference<Number>> values = new ConcurrentHashMap<>();

  private JobMetrics(SparkEnv env, String job) {
    this.env = env;
    this.name = "flinkish." + job;
  }

  /**
   * Shows these values of a job, and no others of it.
   *
   * @param job its name
   * @param json an object: numbers by the name of the metric
   */
  public static void show(String job, String json) {
    SparkEnv env = SparkEnv.get();
    if (env != null) {
      BY_JOB.compute(job, (name, known) -> known != null && known.env == env ? known : registered(env, name)).take(Json.parse(json));
    }
  }

  private static JobMetrics registered(SparkEnv env, String job) {
    JobMetrics metrics = new JobMetrics(env, job);
    env.metricsSystem().registerSource(metrics);
    return metrics;
  }

  private synchronized void take(JsonNode shown) {
    Iterator<Map.Entry<String, JsonNode>> fields = shown.fields();
    while (fields.hasNext()) {
      Map.Entry<String, JsonNode> field = fields.next();
      String metric = field.getKey();
      Number value = field.getValue().numberValue();
      AtomicReference<Number> shownNow = values.get(metric);
      if (shownNow == null) {
        // A sink that still holds a gauge that is gone sees its last value.
        AtomicReference<Number> held = new AtomicReference<>(value);
        values.put(metric, held);
        registry.register(metric, (Gauge<Number>) held::get);
      } else {
        shownNow.set(value);
      }
    }
    for (String metric : registry.getNames()) {
      if (!shown.has(metric)) {
        registry.remove(metric);
        values.remove(metric);
      }
    }
  }

  @Override
  public String sourceName() {
    return name;
  }

  @Override
  public MetricRegistry metricRegistry() {
    return registry;
  }
}
