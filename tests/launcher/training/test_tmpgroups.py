import pytest
import tests.launcher.training.test_guarded_runs as g

NAMES = [n for n in g.EVERY if "groups" in n]


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("kind", ["skipped", "rewound", "stopped"])
def test_it(stage, kind, data, tmp_path):
    names = [n for n in NAMES if f"zero{stage}" in n]
    f = {
        "skipped": g.test_skipped_step_changes_nothing_in_every_stage,
        "rewound": g.test_rewound_run_equals_one_resumed_with_the_later_batches,
        "stopped": g.test_stopped_run_goes_on_as_if_nothing_had_been,
    }[kind]
    f(names, data, tmp_path)
