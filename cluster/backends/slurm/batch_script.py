"""The batch script of a Slurm job: it starts the agents, and passes on what Slurm announces."""

import json
import math
import os
import shlex
from collections.abc import Sequence

from cluster.backends.backend_options import SlurmOptions
from cluster.backends.shared_folder import agent_argv
from cluster.state.run_folder import RunFolder
from cluster.state.spec import JobSpec

NOTICE_SECONDS = 120  # Slurm announces its time limit so long before; it may do so a minute earlier
NOTICE_MARGIN_SECONDS = 10
KILL_WAIT_SECONDS = 30  # from SIGTERM to SIGKILL, unless the cluster's KillWait says otherwise
MARGIN_MINUTES = 5  # between the job's own time limit and Slurm's
STEP_PREFIX = "machine-"  # and the machine's number: the name of the step of an agent

LIMIT_REASON = "Slurm's time limit is near"
END_REASON = "Slurm ends the job"

# A signal ends `wait`, and bash then runs its trap. Steps of machines that were started again belong to other sruns:
# the script stays until all have ended. The stdout of each agent is its own file.
SCRIPT = """\
#!/bin/bash
# The agents of {name}, one on each node.
steps() {{
    squeue --noheader --all --steps --jobs="$SLURM_JOB_ID" --format=%j
}}
notify() {{
    for step in $(steps); do
        case $step in {prefix}*)
            work={work}/${{step#{prefix}}}
            printf '%s\\n' "$1" > "$work/notice.new" && mv "$work/notice.new" "$work/notice";;
        esac
    done
}}
trap {on_limit} USR1
trap {on_end} TERM
nodes=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
{starts}
while [ -n "$(jobs -r)" ]; do wait; done
until names=$(steps) && [[ $names != *{prefix}* ]]; do sleep 5 & wait $!; done
exit 0
"""


def agent_step(options: SlurmOptions, folder: RunFolder, machine: str, elapsed_seconds: float) -> list[str]:
    """Return the arguments of srun that start the agent of a machine; those that name the node are left out."""
    agent = agent_argv(folder, machine, elapsed_seconds)
    address = 'scontrol show node "$SLURMD_NODENAME" --oneliner | sed -n "s/.* NodeAddr=\\([^ ]*\\).*/\\1/p"'
    options_of_node = '--address "${address:-$(hostname)}" --host "$SLURMD_NODENAME"'
    command = f"address=$({address}); exec {shlex.join(agent)} {options_of_node}"
    return [
        "--no-kill",
        "--kill-on-bad-exit=0",
        "--cpu-bind=none",
        f"--job-name={STEP_PREFIX}{machine}",
        "--input=none",
        f"--output={folder.path}/slurm/agent-{machine}.log",
        "--open-mode=append",
        *gpu_arguments(options),
        "sh",
        "-c",
        command,
    ]


def gpu_arguments(options: SlurmOptions) -> list[str]:
    """Return the request for GPUs. srun needs it again: a step has no GPUs unless it asks for them."""
    return [f"--gpus-per-node={options.gpus_per_node}"] if options.gpus_per_node else []


def batch_script(
    spec: JobSpec, options: SlurmOptions, folder: RunFolder, machines: Sequence[str], elapsed_seconds: float
) -> str:
    """Return the batch script that starts the agents of some machines, each on a node of its own."""
    starts = []
    for index, machine in enumerate(machines):
        step = shlex.join(agent_step(options, folder, machine, elapsed_seconds))
        starts.append(f'srun --overlap --nodes=1 --ntasks=1 --nodelist="${{nodes[{index}]}}" {step} &')
    on_limit = json.dumps({"reason": LIMIT_REASON, "seconds": NOTICE_SECONDS - NOTICE_MARGIN_SECONDS})
    on_end = json.dumps({"reason": END_REASON, "seconds": KILL_WAIT_SECONDS})
    return SCRIPT.format(
        name=spec.name,
        prefix=STEP_PREFIX,
        work=shlex.quote(str(folder.work_folder("0").parent)),
        on_limit=shlex.quote(f"notify {shlex.quote(on_limit)}"),
        on_end=shlex.quote(f"notify {shlex.quote(on_end)}"),
        starts="\n".join(starts),
    )


def batch_arguments(
    spec: JobSpec, options: SlurmOptions, folder: RunFolder, name: str, nodes: int, seconds_left: float | None = None
) -> list[str]:
    """Return the arguments of sbatch. `seconds_left` is the rest of the time limit of an earlier job."""
    time_limit = options.time_limit
    if seconds_left is not None:
        time_limit = str(1 + math.ceil(seconds_left / 60))
    elif not time_limit and spec.max_hours is not None:
        time_limit = str(math.ceil(60 * spec.max_hours) + MARGIN_MINUTES)
    wishes = {"partition": options.partition, "time": time_limit}
    return [
        f"--job-name={name}",
        f"--nodes={nodes}",
        "--ntasks-per-node=1",
        "--exclusive",
        "--no-kill",
        "--no-requeue",
        f"--signal=B:USR1@{NOTICE_SECONDS}",
        f"--output={folder.path / 'slurm' / 'job-%j.log'}",
        f"--chdir={os.fspath(folder.path)}",
        "--export=ALL",
        *(f"--{wish}={value}" for wish, value in wishes.items() if value),
        *gpu_arguments(options),
        *options.sbatch_arguments,
    ]
