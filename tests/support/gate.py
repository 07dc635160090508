"""Which tests run when: the lists behind the marks `process` and `smoke`, which tests/conftest.py sets.

Run as a program it prints the paths of the smoke tests.

The gate (.ci/run) runs `make test`, all without the marks `process` and `rehearsal`, and then `make smoke`.
docs/contributing.md says when to run the others.
"""

# Files whose tests start machines with sshd, tmux, agents, trainers or many commands, or many simulated AWS stacks.
PROCESS_FILES = (
    "test_macos_client.py",
    "cluster/agent/processes/test_command_processes.py",
    "cluster/agent/test_agent.py",
    "cluster/agent/test_host_metrics.py",
    "cluster/agent/test_tmux_windows.py",
    "cluster/agent/test_trainers.py",
    "cluster/agent/test_watchdog.py",
    "cluster/backends/slurm/test_slurm_backend.py",
    "cluster/cli/test_app.py",
    "cluster/cli/test_data.py",
    "cluster/cli/test_dry_run.py",
    "cluster/cli/test_output.py",
    "cluster/cli/test_spending.py",
    "cluster/cli/test_trained_network.py",
    "cluster/connectors/test_ssh.py",
    "cluster/connectors/test_tmux.py",
    "cluster/display/test_status.py",
    "cluster/display/test_tensorboard.py",
    "cluster/display/test_top.py",
    "cluster/jobs/test_evaluation.py",
    "cluster/jobs/test_submit_and_store.py",
    "cluster/jobs/test_supervisor.py",
    "cluster/jobs/test_supervisor_access.py",
    "cluster/machines/test_fleet.py",
    "cluster/machines/test_provision.py",
    "cluster/machines/test_python_env.py",
    "cluster/notifications/test_notifier.py",
    "cluster/planning/test_data_fetch.py",
    "cluster/planning/test_plan_forecast.py",
    "infra/aws/instances/test_internet.py",
    "infra/aws/instances/test_preflight.py",
    "infra/aws/stack/test_stack.py",
    "peers/test_exported_networks.py",
    "train/data/packing/test_synthetic.py",
    "train/distributed/test_ddp.py",
    "train/distributed/test_peer_filter.py",
    "train/distributed/test_regroup.py",
    "train/engine/test_agent_channel.py",
    "train/engine/test_warmup.py",
    "train/inference/test_evaluation.py",
    "train/models/test_freezing.py",
    "train/models/test_pretrained.py",
    "train/models/test_registry.py",
    "train/trackers/test_trackers.py",
)

# Whole jobs, and some parts with real processes, that show each organ of the program once.
SMOKE_TESTS = (
    # launch, train, tmux, logs, result
    "end_to_end/test_local.py::test_launch_trains_to_a_complete_result_and_exits_with_0",
    "end_to_end/test_local.py::test_run_folder_has_the_files_of_the_shared_folder_and_the_report",
    "end_to_end/test_local.py::test_job_had_its_tmux_windows_and_a_line_per_epoch_and_leaves_nothing",
    # kill, supervisor, stop, resume
    "end_to_end/test_local.py::test_job_survives_the_kill_of_launch_and_supervisor",
    "end_to_end/test_local.py::test_killed_agent_ends_its_trainers_and_resume_finishes_the_job",
    "end_to_end/test_local.py::test_diverged_job_fails_with_the_loss_and_the_step",
    "end_to_end/test_local.py::test_resume_continues_at_the_step_that_stop_saved",
    "train/engine/test_runs.py::test_run_killed_and_resumed_ends_with_the_same_bits[2]",
    # loss of machines, their return, the same bits
    "end_to_end/test_elastic.py::test_job_ends_undisturbed_after_losing_two_machines_the_supervisor_and_all[in-place]",
    # a script of the user
    "end_to_end/test_run.py::test_script_gets_the_variables_of_torchrun_and_continues_after_a_loss",
    # agents and trainers
    "cluster/agent/test_agent.py::test_agent_trainers_write_result_job_is_done",
    "cluster/agent/test_agent.py::test_agent_crash_resumes_from_newest_checkpoint",
    "cluster/agent/test_agent.py::test_agents_of_two_machines_survive_loss_of_the_first",
    # ssh, set-up, adoption
    "cluster/connectors/test_ssh.py::test_run_passes_arguments_unchanged",
    "cluster/connectors/test_ssh.py::test_run_survives_cut_connection_and_runs_once",
    "cluster/connectors/test_ssh.py::test_connect_changed_host_key_is_refused_with_remedy[False]",
    "cluster/machines/test_provision.py::test_killed_supervisor_is_replaced_and_setup_finishes[cluster.agent]",
    "end_to_end/test_ssh.py::test_unreachable_machines_train_on_and_another_user_can_adopt_the_job",
    # rented machines, `down`, what is left
    "end_to_end/test_aws.py::test_stop_saves_and_fetches_the_files_without_a_supervisor",
    "end_to_end/test_aws_faults.py::test_supervisor_of_a_job_ended_from_elsewhere_rents_nothing",
    # packed sets, the report in a browser
    "end_to_end/test_fetch.py::test_local_job_fetches_what_its_phases_read",
    "cluster/report/test_report.py::test_page_is_visible_in_both_schemes_with_empty_console[phone]",
)

if __name__ == "__main__":
    print(*(f"tests/{test}" for test in SMOKE_TESTS))
