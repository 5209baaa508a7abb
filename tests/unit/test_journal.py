"""Journals: recorded ones are read, torn lines are cut off, two searches never share one."""

from pathlib import Path

import pytest

from dstune.errors import ConfigFileError, UsageError
from dstune.search.journal import Journal, read_lines
from dstune.search.trial import Outcome, Trial

STUDIES = Path(__file__).parents[1] / "data/studies"


def recorded(name: str) -> list[Trial]:
    path = STUDIES / f"{name}-gpt2-medium-24gib.jsonl"
    return read_lines(path, path.read_bytes())[1]


@pytest.mark.parametrize("name", ["search", "grid"])
def test_predicted_peaks_are_the_measured_ones(name: str) -> None:
    trials = [trial for trial in recorded(name) if trial.predicted_bytes is not None]
    assert len(trials) >= 4
    for trial in trials:
        assert trial.measurement is not None
        assert trial.measurement.peak_reserved_bytes == trial.predicted_bytes


def test_a_torn_last_line_is_cut_off_and_the_search_goes_on(tmp_path: Path) -> None:
    [first, second, *_] = recorded("search")
    with Journal(tmp_path, {"of": "this"}) as journal:
        journal.add(first)
    whole = journal.path.read_bytes()
    journal.path.write_bytes(whole + whole[-40:-1])
    with Journal(tmp_path, {"of": "this"}) as journal:
        assert journal.trials == [first]
        journal.add(second)
    assert [trial.number for trial in read_lines(journal.path, journal.path.read_bytes())[1]] == [1, 2]


def test_an_interrupted_trial_is_tried_again(tmp_path: Path) -> None:
    trial = recorded("search")[0]
    ending = trial.ending.model_copy(update={"outcome": Outcome.INTERRUPTED})
    with Journal(tmp_path, {}) as journal:
        journal.add(trial.model_copy(update={"ending": ending, "measurement": None}))
    with Journal(tmp_path, {}) as journal:
        assert journal.trials == []


def test_a_second_search_is_refused_while_the_first_runs(tmp_path: Path) -> None:
    with Journal(tmp_path, {}), pytest.raises(UsageError, match="another search is running"), Journal(tmp_path, {}):
        pass


def test_another_study_is_refused_and_can_be_put_aside(tmp_path: Path) -> None:
    with Journal(tmp_path, {"memory_cap_bytes": 1}) as journal:
        journal.add(recorded("search")[0])
    with pytest.raises(UsageError, match="memory_cap_bytes"), Journal(tmp_path, {"memory_cap_bytes": 2}):
        pass
    with Journal(tmp_path, {"memory_cap_bytes": 2}, restart=True) as journal:
        assert journal.trials == []
    assert (tmp_path / "journal.old.jsonl").exists()


def test_a_damaged_line_in_the_middle_is_placed(tmp_path: Path) -> None:
    with Journal(tmp_path, {}) as journal:
        journal.add(recorded("search")[0])
    lines = journal.path.read_text().splitlines()
    journal.path.write_text("\n".join([lines[0], "{}", lines[1], ""]))
    with pytest.raises(ConfigFileError, match=r"journal\.jsonl:2"), Journal(tmp_path, {}):
        pass
