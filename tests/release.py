"""The slow tests that CI runs: a short form of each promise (docs/testing.md). All other slow tests, campaigns and
further cases, are `make test-release`."""

from __future__ import annotations

from typing import Final

SHORT: Final = (
    # Faults: a campaign, whole runs that are killed and stopped, exactly once.
    "chaos/test_chaos.py::test_the_cases",
    "chaos/test_chaos.py::test_faults_lose_nothing_and_leave_nothing[deadline-bound-2]",
    *(f"integration/test_whole_run.py::test_{name}" for name in ("ctrl_c", "a_damaged_checkpoint")),
    "integration/test_exactly_once.py::test_an_interrupted_run_settles_the_samples_of_one_that_was_not[4]",
    "integration/test_exactly_once.py::test_at_bound_0",
    "integration/test_synchronous.py::test_no_staleness_gives_the_losses_of_a_plain_synchronous_loop[collective]",
    "integration/test_replay.py::test_a_replay_makes",
    "integration/test_join.py::test_workers_join",
    "buffer/test_kill.py::test_a_run_whose_buffer_is_killed_again_and_again_loses_and_repeats_nothing[2-1]",
    "launch/test_recovery.py::test_a_stopped_buffer",
    "launch/workers/test_backends.py::test_its_workers_do_not_outlive_a_launcher_that_is_killed",
    # What the user types, who listens, which figures are told.
    "integration/test_typed_commands.py::test_the_projects_own_command",
    "launch/test_typed_commands.py",
    "integration/test_installed.py",
    "integration/test_listening.py::test_a_run_with_endpoint",
    "integration/test_trace.py::test_the_figures_of_a_trace",
    "tools/view/test_in_browser.py",
    # Learning: ranks, recipes, adapters, agents.
    "learner/ranks/test_ranks.py::test_ranks_that_divide_each_sequence_do_what_one_does_alone[2-2-1]",
    "integration/test_top_k_runs.py::test_a_run_trains_on_hidden_states",
    "integration/test_recipes.py::test_a_recipe_trains_by_what_it_names[opd_grpo-sampled-True]",
    "integration/test_lora_run.py",
    "integration/test_agents.py::test_an_agent_of_the_openai_sdk",
    "actors/test_memory.py",
    # Hosts and weights.
    "hosts/test_hosts.py",
    "hosts/test_wiretap.py::test_weights_between_hosts_cannot_be_read_unless_that_was_allowed[False]",
    "weights/test_group_faults.py::test_the_newest_version_reaches_all_who_live_after_each_of_20_faults[engines]",
    # Real SGLang servers.
    *(f"sglang/test_{name}.py" for name in ("sglang_engine", "sglang_scorer", "weight_swap", "workers")),
    "sglang/test_weight_push.py::test_each_server_answers_under_the_version_that_was_published[1]",
    "sglang/test_weight_push.py::test_a_push_in_the_middle",
    "sglang/test_weight_push.py::test_a_server_that_keeps_old_weights_is_found_within_verify_every_versions[abort",
    "integration/test_sglang_run.py::test_a_run_on_servers",
    "test_gpu_stages.py::test_a_stage_runs_as_it_stands[a]",
)
"""Beginnings of `path::name[case]` under tests/."""
SHORT_FILES: Final = frozenset(name.partition("::")[0] for name in SHORT)
SHORT_MARKS: Final = "slow and not release"
"""Of `make test-slow`, which therefore reads no other files."""
