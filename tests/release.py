"""The tests that `make test-release` runs and CI does not: campaigns, further cases of what CI has in a short form, and
packages and schedulers beside the main ones. docs/testing.md names for each promise the tests that CI has."""

from __future__ import annotations

from typing import Final

RELEASE: Final = (
    "bench/race",
    "builtin/test_topk_payloads.py",
    # Hosts in namespaces: CI has a partition with a killed buffer, a run without a shared folder, and the wiretap.
    *(f"hosts/test_{name}.py" for name in ("agent_over_ssh", "delay_and_loss", "encrypted_joins", "join_hosts")),
    *(f"hosts/test_{name}.py" for name in ("rank_silence", "server_by_wire", "wireguard")),
    "hosts/test_no_shared_folder.py::test_without_a_store",
    # Campaigns of faults: CI has one of them, at bound 2 over two shards.
    "chaos/test_hosts.py",
    *(
        f"chaos/test_chaos.py::test_faults_lose_nothing_and_leave_nothing[{case}]"
        for case in ("deadline-bound-1-shards-1", "rollout-bound-0-shards-1", "segment-bound-4-shards-1")
    ),
    "weights/test_group_faults.py::test_the_newest_version_reaches_all_who_live_after_each_of_20_faults[servers]",
    "weights/test_group_faults.py::test_it_does_so_too_where_versions_come_as_differences",
    "weights/test_publisher_soak.py",
    "buffer/test_buffer_sim.py::test_twenty_thousand_random_events_break_nothing[10]",
    "buffer/test_buffer_sim.py::test_twenty_thousand_random_events_break_nothing[13]",
    "buffer/test_buffer_sim.py::test_shards_are_one_buffer_in_any_course_of_events[4-6]",
    "buffer/test_kill.py::test_a_run_whose_buffer_is_killed_again_and_again_loses_and_repeats_nothing[1-256]",
    *(
        f"buffer/test_memory.py::test_no_container_of_the_state_grows_with_the_rollouts[{case}]"
        for case in ("rollout-1", "segment-1", "deadline-4")
    ),
    *(
        f"buffer/test_memory.py::test_what_is_let_go_is_in_no_cycle[{case}]"
        for case in ("rollout-settings1", "segment-settings2", "deadline-settings3")
    ),
    "actors/trajectory/test_graph.py::test_many_random",
    # Clusters: CI has a run on Ray that loses a node, and a job on Slurm that is stopped and resumed.
    *(f"launch/ray/test_{name}" for name in ("autoscaled_run", "gpus_on_ray", "hosts_that_leave", "own_cluster")),
    *(f"launch/ray/test_{name}" for name in ("pools_on_ray", "ranks_on_ray", "reservation", "store_on_ray")),
    "launch/render/test_slurm.py::test_a_run_with_a_store",
    # Ranks: CI has two ranks, and two that divide each sequence.
    "learner/ranks/test_ranks.py::test_ranks_do_together_what_one_does_alone_in_all_cases[4]",
    *(
        f"learner/ranks/test_ranks.py::test_ranks_that_divide_each_sequence_do_what_one_does_alone[{case}]"
        for case in ("4-2-1", "4-4-1")
    ),
    *(
        f"learner/ranks/test_from_shares.py::test_actors_get_what_one_process_has_and_no_rank_holds_it_all[{case}]"
        for case in ("4-1", "4-2")
    ),
    "learner/ranks/test_checkpoints.py::test_any_number_of_ranks_goes_on_from_a_checkpoint_of_any_other[4 ranks 1",
    "learner/checkpoints/test_failing_store.py::test_an_upload_that_fails_once_is_made_again",
    "learner/checkpoints/test_failing_store.py::test_an_average",
    "learner/checkpoints/test_failing_store.py::test_a_slow_store",
    # Speed as it is measured, and what other packages show: trackers, Perfetto, notebooks.
    "integration/test_attribution.py",
    "integration/test_boards.py",
    "integration/test_trace_in_perfetto.py",
    "integration/test_third_engine.py",
    *(
        f"integration/test_notebook.py::{name}"
        for name in ("test_a_run_that_fails", "test_the_example_notebook", "test_stopping")
    ),
    "learner/reports/test_tracker_packages.py",
    # Whole runs of which CI has another case.
    *(
        f"integration/test_agents.py::test_{name}"
        for name in ("the_student_is_taught_on_tasks_of_reasoning", "rows_mix")
    ),
    *(
        f"integration/test_agents.py::test_{name}"
        for name in ("the_student_plays_games_of_textarena", "the_student_is_taught_in_an")
    ),
    *(
        f"integration/test_agents.py::test_{name}"
        for name in ("the_student_is_taught_behind", "the_student_runs_python")
    ),
    "integration/test_agents.py::test_the_student_is_taught_by_the_train_client_of_verifiers[sglang]",
    *(
        f"integration/test_top_k_runs.py::test_a_run_trains_on_a_divergence_between_distributions[{case}]"
        for case in ("forward_kl", "mixed", "jsd")
    ),
    "integration/test_recipes.py::test_a_recipe_trains_by_what_it_names[opd-sampled-False]",
    "integration/test_recipes.py::test_a_recipe_trains_by_what_it_names[grpo-None-True]",
    "integration/test_learner_ranks.py::test_ranks_on_two_hosts",
    "integration/test_learner_ranks.py::test_ranks_send_weights_to_a_server",
    *(
        f"integration/test_store.py::test_{name}"
        for name in ("adapters_and", "a_dead_launch", "a_store_that_refuses", "training_goes_on")
    ),
    "integration/test_synchronous.py::test_no_staleness_gives_the_losses_of_a_plain_synchronous_loop[folder]",
    "integration/test_resume_equality.py::test_killed_at_a_random_step_and_resumed_it_has_consumed_the_same[ppo]",
    "integration/test_exactly_once.py::test_an_interrupted_run_settles_the_samples_of_one_that_was_not[0]",
    "integration/test_shards.py::test_a_run_goes_on_from_a_checkpoint_with_any_number_of_shards[2-1]",
    "integration/test_lost_journal.py::test_a_run_whose_journal_is_lost_ends_with_the_reason_and_can_be_resumed[removed",
    "integration/test_rejoin.py::test_a_join_leaves",
    "integration/test_dynamic_sampling.py::test_a_run_of_nothing",
    "launch/test_recovery.py::test_the_buffer_never_waits",
    "launch/test_recovery.py::test_a_killed_fork_server_is_started_again_and_forks_its_workers_anew[fork]",
    "launch/test_recovery.py::test_a_buffer_that_breaks_off_while_it_drains_still_leaves_its_ledger[19]",
    # SGLang: further cases of adapters, mixtures and members that are lost.
    *(
        f"sglang/test_adapters.py::test_a_version_that_comes_while_requests_run_cuts_them_and_every_token_has_its_own[{case}]"
        for case in ("folder", "store")
    ),
    "sglang/test_mixture_of_experts.py::test_weights_that_are_sent_in_another_dtype",
    "sglang/test_mixture_of_experts.py::test_one_expert",
    "sglang/test_weight_push.py::test_each_server_answers_under_the_version_that_was_published[3]",
    "sglang/test_weight_push.py::test_a_server_that_keeps_old_weights_is_found_within_verify_every_versions[in_place",
    "sglang/test_weight_push.py::test_a_server_that_keeps_old_weights_is_found_within_verify_every_versions[retract",
    "sglang/test_weights_by_wire.py::test_each_server_answers_under_the_version_that_its_actor_fetched[3]",
)
"""Beginnings of `path::name[case]` under tests/."""
