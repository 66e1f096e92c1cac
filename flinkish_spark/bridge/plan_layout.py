"""Names in a plan, and what they name: sources and operators in the order in which Spark counts them.

Spark's logs have no names. A frame that gets an alias keeps it in its analysed plan, which is where
names of ours are put and found again.
"""

from __future__ import annotations

from typing import Any

from pyspark.sql import DataFrame

from flinkish_spark.protocol.scans import Chain, OperatorInstance, PlanLayout, Scan, ScanRole

_PREFIX = "flinkish"
_SOURCES = ("StreamingRelationV2", "StreamingRelation", "StreamingExecutionRelation")
_STATEFUL = "FlatMapGroupsInPandasWithState"


def named_chain(frame: DataFrame, chain: Chain) -> DataFrame:
    """Return `frame` as the end of a chain.

    As of :func:`named_scan`: expressions that name a column by an older alias no longer find it, so
    this comes after all of the user's.
    """
    return frame.alias(f"{_PREFIX}:chain:{chain.name}")


def named_scan(frame: DataFrame, role: ScanRole, uid: str = "") -> DataFrame:
    """Return `frame` so that the sources in its plan are known by that role and uid."""
    return frame.alias(f"{_PREFIX}:{role.value}:{uid}")


def named_operator(frame: DataFrame, uid: str) -> DataFrame:
    """Return `frame` so that the keyed operator right below is known as `uid`."""
    return frame.alias(f"{_PREFIX}:operator:{uid}")


def layout_of(frame: DataFrame) -> PlanLayout:
    """Return the sources and operators of a plan of ours, in Spark's order.

    Raises
    ------
    ValueError
        Something in the plan has no name.
    """
    scans: list[Scan] = []
    operators: list[OperatorInstance] = []
    _collect(frame._jdf.queryExecution().analyzed(), {}, scans, operators)
    return PlanLayout(tuple(scans), tuple(operators))


def _collect(node: Any, names: dict[str, str], scans: list[Scan], operators: list[OperatorInstance]) -> None:
    """Walk from the top down and from left to right, as Spark does where it numbers them.

    `names` holds the nearest names above: of the chain, the operator and the scan.
    """
    kind = node.getClass().getSimpleName()
    if kind == "SubqueryAlias":
        parts = node.alias().split(":")
        if parts[0] == _PREFIX:
            what = parts[1] if parts[1] in ("chain", "operator") else "scan"
            names = {**names, what: ":".join(parts[1:]) if what == "scan" else parts[2]}
    elif kind == _STATEFUL:
        operators.append(OperatorInstance(_known(names, "operator"), _known(names, "chain")))
    elif kind in _SOURCES:
        role, uid = _known(names, "scan").split(":")
        scans.append(Scan(ScanRole(role), uid, _known(names, "chain")))
    children = node.children()
    for index in range(children.size()):
        _collect(children.apply(index), names, scans, operators)


def _known(names: dict[str, str], what: str) -> str:
    if what not in names:
        raise ValueError(f"the plan has a part without the name of its {what}")
    return names[what]
