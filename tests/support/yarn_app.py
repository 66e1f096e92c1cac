"""A job for YARN, as a user would submit it: running totals from Kafka to Kafka; it keeps all on HDFS."""

import argparse

from flinkish_spark import (
    CheckpointConfig,
    FixedDelay,
    Json,
    KafkaSink,
    KafkaSource,
    KeyedProcessFunction,
    StreamExecutionEnvironment,
    ValueStateDescriptor,
)


class Totals(KeyedProcessFunction):
    def open(self, context):
        self.total = context.get_state(ValueStateDescriptor("total", "LONG", default=0))
        with open(context.get_distributed_cache().get_file("factor")) as file:
            self.factor = int(file.read())

    def process_element(self, order, ctx):
        self.total.update(self.total.value() + self.factor * order.amount)
        yield order.user, self.total.value()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--servers", "--source", "--target", "--job-dir", "--factor"):
        parser.add_argument(name, required=True)
    args = parser.parse_args()
    env = StreamExecutionEnvironment.get_execution_environment(
        "totals",
        args.job_dir,
        checkpoint=CheckpointConfig(interval_ms=2_000),
        restart_strategy=FixedDelay(attempts=10, delay_ms=500),
    )
    env.register_cached_file(args.factor, "factor")
    orders = KafkaSource(args.servers, [args.source], value=Json("user STRING, amount LONG"))
    totals = env.from_source(orders, uid="orders").key_by("user")
    totals.process(Totals(), output="user STRING, total LONG", uid="totals").sink_to(
        KafkaSink(args.servers, args.target, value=Json()), uid="out"
    )
    env.execute()


if __name__ == "__main__":
    main()
