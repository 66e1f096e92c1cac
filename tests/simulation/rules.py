"""The names of the invariants."""

from __future__ import annotations

import enum

from tests.simulation.world import World


class Rule(enum.Enum):
    """Names of the invariants; the value says what must hold."""

    DECISION_FIRST = "nothing is visible before its checkpoint is decided"
    ONE_DECISION = "a committable is in one decision only"
    DECISIONS_FOLLOW = "decisions cover the micro-batches one after the other, without a gap"
    ROWS_STAGED_ONCE = "each row of a committed micro-batch is in exactly one committable per sink"
    STATE_FOLLOWS = "the state goes on from the last decided checkpoint"
    BARRIERS_COUNTED = "every sink showed the barrier on every channel before the decision"
    BARRIERS_BOUND = "the barrier record of an aborted checkpoint is never visible"
    ONE_UNCONFIRMED = "the next decision waits for the receipt of the one before"
    RECEIPT_LAST = "a receipt means that everything of the checkpoint is committed"
    NOTIFIED_LAST = "nobody hears of a complete checkpoint before its receipt"
    OFFSETS_LAST = "group offsets are not ahead of what is visible"
    IDS_RISE = "checkpoint ids rise and are never used again"
    ONE_RETAINED = "the newest complete checkpoint stays"
    NOTHING_REFERENCED = "nothing is deleted or aborted that somebody still needs"
    ZOMBIE_HARMLESS = "a process that lost the job decides nothing"
    INTENT_FIRST = "an entry of commits/ is taken back only once a durable intent names it"
    REWIND_KEEPS = "a plain rewind removes nothing that is decided"
    HOOKS_RESTORED = "a hook gets back what it gave for the checkpoint that the job starts from"
    TABLE_RESTORED = "a rewind that restores tables takes back what was committed after its target"
    ANSWERED = "whoever asked for a checkpoint is answered, once"
    TOLD_TO_END = "a driver that was told to end says so, and a standby takes nothing over then"
    NO_SURPRISE = "a process ends only with an error that its surroundings caused"
    NO_DEAD_END = "the job comes to its end once nothing fails any more"
    EXACTLY_ONCE = "in the end each record is visible exactly once in every sink, with the right state"
    IN_ORDER = "a reader of a topic sees the records of a key in the order in which they were made"
    LOST_ALONE = "a replay stages again, and replaces, what is lost and nothing else"
    ABORTED_FIRST = "what is lost can be committed by nobody before something is named in its place"
    REPLAY_REPLACES = "what takes the place of lost data holds the same rows, before there is a receipt"
    REPLAYS_APART = "nobody reads the folder of another owner's replay, or deletes a newer owner's"
    ONE_TIMELINE = (
        "a job whose directory is an older copy touches nothing outside, and its start is refused; "
        "a copy commits nothing to a sink in which its original has committed what was given up in the copy"
    )
    NO_LEFTOVERS = "a stopped job leaves no open transaction and no folder of a replay behind"


def require(world: World, holds: bool, rule: Rule, detail: str) -> None:
    """End the run unless an invariant holds."""
    if not holds and not world.scheduler.is_over:
        world.broken(rule.name, f"{rule.value}: {detail}")


def rule_table() -> str:
    """Return the rules as a Markdown table; `docs/simulation.md` quotes it."""
    rows = ["| invariant | what must hold |", "|---|---|"]
    return "\n".join([*rows, *(f"| {rule.name} | {rule.value} |" for rule in Rule)])
