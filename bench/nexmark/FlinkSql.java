import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import org.apache.flink.configuration.Configuration;
import org.apache.flink.shaded.jackson2.com.fasterxml.jackson.databind.JsonNode;
import org.apache.flink.shaded.jackson2.com.fasterxml.jackson.databind.ObjectMapper;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;
import org.apache.flink.table.api.TableResult;
import org.apache.flink.table.api.bridge.java.StreamTableEnvironment;

/**
 * Runs statements of Flink SQL in a cluster in this process, which stays warm: a request a line, as JSON, with
 * {@code settings} and {@code statements}, of which the last one is the job.
 *
 * <p>Answers with a line when the job runs, {@code {"job": id}}, and with another when it has ended. Whoever asks watches
 * the job meanwhile, through the cluster's REST interface.
 */
public final class FlinkSql {
    public static void main(String[] given) throws Exception {
        ObjectMapper json = new ObjectMapper();
        System.out.println("{\"ready\": true}");
        BufferedReader requests = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = requests.readLine(); line != null; line = requests.readLine()) {
            JsonNode request = json.readTree(line);
            Configuration settings = new Configuration();
            request.get("settings").fields().forEachRemaining(e -> settings.setString(e.getKey(), e.getValue().asText()));
            StreamExecutionEnvironment env = StreamExecutionEnvironment.createLocalEnvironment(settings);
            StreamTableEnvironment tables = StreamTableEnvironment.create(env);
            TableResult result = null;
            for (JsonNode statement : request.get("statements")) {
                result = tables.executeSql(statement.asText());
            }
            System.out.println("{\"job\": \"" + result.getJobClient().get().getJobID() + "\"}");
            try {
                result.await();
                System.out.println("{\"ended\": \"finished\"}");
            } catch (Exception ended) {
                // Cancelled by whoever asked, or failed: the log says which.
                ended.printStackTrace();
                System.out.println("{\"ended\": \"not finished\"}");
            }
        }
    }
}
