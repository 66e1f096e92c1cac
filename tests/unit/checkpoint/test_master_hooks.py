"""Systems outside Spark that take part in checkpoints under a name."""

from __future__ import annotations

import math

import pytest

from flinkish_spark.checkpoint.hooks import HookError, MasterHooks, UnknownHookState
from flinkish_spark.contracts.hooks import MasterHook
from flinkish_spark.core.errors import ConfigError, JobDirError
from flinkish_spark.protocol.checkpoint import Participant, ParticipantKind
from flinkish_spark.protocol.ids import CheckpointId
from tests.support.coordinator_rig import RecordedHook, hook_participant

SEVEN = CheckpointId(7)


class Giving(MasterHook):
    """Does no more than a hook must."""

    def __init__(self, given, name="catalog") -> None:
        self._given, self._name = given, name

    @property
    def name(self) -> str:
        return self._name

    def trigger(self, checkpoint_id):
        return self._given

    def restore(self, checkpoint_id, state) -> None:
        raise RuntimeError(f"cannot go back to {checkpoint_id}")


# -- names ----------------------------------------------------------------------------------------------


def test_a_name_is_taken_once() -> None:
    """Behaviour 80."""
    hooks = MasterHooks([RecordedHook("a"), RecordedHook("b")])
    with pytest.raises(ConfigError, match="two master hooks named 'a'"):
        hooks.add(RecordedHook("a"))
    assert hooks.participants() == (hook_participant("a"), hook_participant("b"))


@pytest.mark.parametrize("name", ["", "a/b", None, 7])
def test_a_name_that_cannot_be_used_is_refused(name) -> None:
    """Behaviour 80."""
    with pytest.raises(ConfigError, match="name of a master hook"):
        MasterHooks([RecordedHook(name)])


def test_every_hook_is_called_at_a_trigger_in_its_order() -> None:
    """Behaviours 40, 80: nothing to remember is an answer too."""
    order = []
    first, second = RecordedHook("a"), RecordedHook("b")
    first.on_trigger = lambda: order.append("a")
    second.on_trigger = lambda: order.append("b")
    given = MasterHooks([second, first, Giving(None, "c")]).trigger(SEVEN)
    assert order == ["b", "a"]
    assert given == {
        hook_participant("a"): {"version": 1},
        hook_participant("b"): {"version": 1},
        hook_participant("c"): None,
    }


def test_what_a_hook_gave_is_what_it_will_get_back() -> None:
    """Behaviour 80: as JSON has it, from the first start on."""
    given = MasterHooks([Giving({"versions": (1, 2), "name": "ä"})]).trigger(SEVEN)
    assert given == {Participant(ParticipantKind.HOOK, "catalog"): {"versions": [1, 2], "name": "ä"}}


def test_a_hook_that_fails_ends_the_trigger() -> None:
    """Behaviours 20, 81: those behind it are not called."""
    failing, behind = RecordedHook("a"), RecordedHook("b")
    failing.failing = [RuntimeError("no answer")]
    with pytest.raises(HookError, match=r"'a' failed in checkpoint 7.*RuntimeError: no answer") as caught:
        MasterHooks([failing, behind]).trigger(SEVEN)
    assert (caught.value.hook, caught.value.restartable, behind.calls) == ("a", True, [])  # type: ignore[attr-defined]


@pytest.mark.parametrize("given", [{"at": object()}, {"at": math.nan}, 7, {"at": b"bytes"}])
def test_what_cannot_be_stored_ends_the_trigger(given) -> None:
    """Behaviour 81."""
    with pytest.raises(HookError, match="failed in checkpoint 7"):
        MasterHooks([Giving(given)]).trigger(SEVEN)


def test_no_hook_is_called_while_one_has_not_returned() -> None:
    """Behaviour 55: it is called by a thread that the coordinator has given up."""
    hook = RecordedHook()
    hooks = MasterHooks([hook])
    refused = []

    def call_again() -> None:
        for call in (lambda: hooks.trigger(CheckpointId(8)), lambda: hooks.restore(None, {})):
            with pytest.raises(HookError, match="has not returned from checkpoint 7"):
                call()
            refused.append(True)

    hook.on_trigger = call_again
    hooks.trigger(SEVEN)
    hook.on_trigger = lambda: None
    hooks.trigger(CheckpointId(9))
    assert refused == [True, True]
    assert hook.calls == [("trigger", 7), ("trigger", 9)]


# -- restore --------------------------------------------------------------------------------------------


def test_each_hook_gets_its_own_state_back() -> None:
    """Behaviour 80."""
    first, second = RecordedHook("a"), RecordedHook("b")
    MasterHooks([first, second]).restore(SEVEN, {"a": {"version": 3}, "b": None})
    assert first.calls == [("restore", 7, {"version": 3})]
    assert second.calls == [("restore", 7, None)]


def test_without_a_checkpoint_or_a_state_in_it_a_hook_begins_anew() -> None:
    """Behaviour 80: reset; also a hook that was added since."""
    old, new = RecordedHook("old"), RecordedHook("new")
    hooks = MasterHooks([old, new])
    hooks.restore(None, {})
    hooks.restore(SEVEN, {"old": {}})
    assert old.calls == [("reset",), ("restore", 7, {})]
    assert new.calls == [("reset",), ("reset",)]


def test_the_optional_calls_of_a_hook_do_nothing() -> None:
    """Behaviour 80."""
    hooks = MasterHooks([Giving({})])
    hooks.restore(None, {})
    hooks.close()


def test_a_hook_that_fails_ends_the_restore() -> None:
    """Behaviour 82."""
    behind = RecordedHook("b")
    with pytest.raises(HookError, match=r"'catalog' could not be restored.*cannot go back to 7"):
        MasterHooks([Giving({}), behind]).restore(SEVEN, {"catalog": {}})
    assert behind.calls == []


def test_state_of_a_hook_that_is_gone_is_refused() -> None:
    """Behaviour 83: before any hook is called."""
    hook = RecordedHook("b")
    with pytest.raises(JobDirError, match="hook 'a' that the job does not have") as caught:
        MasterHooks([hook]).restore(SEVEN, {"b": {}, "c": {}, "a": {}})
    assert (caught.value.hook, hook.calls) == ("a", [])  # type: ignore[attr-defined]


def test_state_of_a_hook_that_is_gone_can_be_left_out() -> None:
    """Behaviour 83."""
    hook = RecordedHook("b")
    MasterHooks([hook], UnknownHookState.IGNORE).restore(SEVEN, {"a": {}, "b": {"version": 1}})
    assert hook.calls == [("restore", 7, {"version": 1})]


def test_closing_reaches_every_hook(caplog) -> None:
    class Stuck(RecordedHook):
        def close(self) -> None:
            raise RuntimeError("busy")

    last = RecordedHook("b")
    MasterHooks([Stuck("a"), last]).close()
    assert last.calls == [("close",)]
    assert "closing the master hook 'a' failed: RuntimeError: busy" in caplog.text
