"""`flinkish timeline accept`: one order for one start."""

from __future__ import annotations

from pathlib import Path

from tests.support.cli_rig import JobOnDisk, flinkish, said


def test_accepting_is_an_order_that_the_next_start_finds(tmp_path: Path) -> None:
    job = JobOnDisk(tmp_path)
    job.commit(7)
    asked = flinkish("timeline", "accept", tmp_path, answers="y\n")
    assert asked.exit_code == 0
    assert "continues from checkpoint 7" in asked.output
    assert "rows may be duplicated" in asked.output
    assert job.job_dir.timeline_is_ordered()
    again = flinkish("timeline", "accept", tmp_path, "--yes")
    assert (again.exit_code, "it was ordered before" in again.output) == (0, True)


def test_nothing_is_ordered_without_a_yes(tmp_path: Path) -> None:
    job = JobOnDisk(tmp_path)
    refused = flinkish("timeline", "accept", tmp_path, answers="n\n")
    assert refused.exit_code != 0
    assert "continues from its beginning" in refused.output
    assert not job.job_dir.timeline_is_ordered()


def test_programs_get_json(tmp_path: Path) -> None:
    JobOnDisk(tmp_path)
    document = said(flinkish("timeline", "accept", tmp_path, "--yes", "--json"))
    assert (document["job"], document["outcome"]) == ("orders", "WAITS_FOR_START")


def test_where_there_is_no_job_nothing_is_ordered(tmp_path: Path) -> None:
    refused = flinkish("timeline", "accept", tmp_path, "--yes")
    assert refused.exit_code == 2
    assert list(tmp_path.iterdir()) == []
