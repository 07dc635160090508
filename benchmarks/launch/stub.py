"""A shell script that stands in for Python on a machine: it waits as long as our modules would, and prints the same.

Used by benchmarks/launch and by tests of the machines' set-up that need no training.
"""

import re
from dataclasses import dataclass
from pathlib import Path

RECIPE = """\
from train.recipe import Data, Model, Optim, Phase, Recipe

recipe = Recipe(
    name="nothing", data=Data(name="none", root="/nowhere", train=10**6, val=1), model=Model(name="resnet10_tiny"),
    optim=Optim(nesterov=True), machines=1, gpus=1, phases=[Phase(epochs=(0, 2), size=32, batch=8, lr=0.01)],
)
"""

# Takes Python's arguments: -m MODULE ARGUMENTS. A module that another one is asked to run is a call of its own. Each
# call is logged in <stub>.log. The file
# <stub>.d/MODULE-MACHINE, if it exists, is sourced first and may change functions and variables; MACHINE is the number
# of the machine in the test bed. A placeholder in braces is a field of StubDelays.
STUB_SCRIPT = r"""#!/bin/sh
stub=$0 module=$2 machine=${HOME%/home} steps={steps} free=100
machine=${machine##*/}
shift 2
echo "$module $machine" >>"$stub.log"
[ ! -e "$stub.d/$module-$machine" ] || . "$stub.d/$module-$machine"

probe() {
  seen=
  while [ $# -gt 0 ]; do
    case $1 in
      --shared) shared=$2;; --work) work=$2;; --token) token=$2;; --machine) name=$2;; --expect) expect=$2;;
    esac
    shift 2
  done
  if [ "$expect" ]; then
    IFS=,
    for other in $expect; do
      [ -e "$shared/probe/$token-$other" ] && seen="$seen${seen:+, }\"$other\": true"
    done
    printf '{%s}\n' "$seen"
    return
  fi
  sleep {probe}
  mkdir -p "$shared/probe" && : >"$shared/probe/$token-$name"
  printf '{"tmux": "3", "shm_bytes": 1000000000, "gpus": [], "nvidia": "missing", '
  printf '"work": {"path": "%s", "writable": true, "free_gb": %s}, ' "$work" "$free"
  printf '"shared": {"path": "%s", "link": true, ' "$shared"
  printf '"type": "ext4", "options": "rw", "point": "/", "source": "none"}, "time": %s}\n' "$(date +%s.%N)"
}

write_status() {
  printf '{"id": "%s.%s", "launch": "%s", "pid": %s, "attempt": %s, "phase": "%s", "state": "%s", "step": %s, %s}' \
    "$name" "$$" "$launch" "$$" "$number" "$1" "$2" "$step" "${3:-\"steps\": $steps}" >"$shared/status/$name.json"
  [ "$2" = "$last_state" ] || printf '{"time": %s, "attempt": %s, "state": "%s"}\n' "$(date +%s.%N)" "$number" "$2" \
    >>"$shared/logs/agent-$name.jsonl"
  last_state=$2
}

sleep_unless_stopped() {
  sleep "$1" 9>&-
  [ ! -e "$shared/stop" ] || { write_status ended stopped '"reason": "stopped by the user", "ended": true'; exit 0; }
}

propose() {
  while set -- "$shared"/status/*.json && [ $# -lt {count} ]; do sleep_unless_stopped 0.2; done
  members=
  for path; do file=${path##*/}; members="$members${members:+, }\"${file%.json}.1\""; done
  printf '{"number": %s, "launch_id": "%s", "members": [%s], "time": %s}' \
    "$number" "$launch" "$members" "$(date +%s.%N)" >"$shared/.attempt"
  mv "$shared/.attempt" "$attempt"
}

agent() {
  shared=$1 work=$2 name=$3 step=0 number=1
  mkdir -p "$work" "$shared/status" "$shared/logs" "$shared/attempts" "$shared/metrics"
  exec 9>>"$work/agent.lock"
  flock -w 2 9 || exit 1
  echo $$ >"$work/agent.lock"
  read -r launch <"$shared/launch" || [ "$launch" ] || exit 1
  write_status warming warming
  sleep_unless_stopped {start}
  attempt=$shared/attempts/000001.json
  [ -e "$attempt" ] || [ "$name" != 0 ] || propose
  until [ -e "$attempt" ]; do sleep_unless_stopped 0.2; done
  while [ ! -e "$shared/result.json" ]; do
    step=$((step + 1))
    write_status running training
    place="\"attempt\": 1, \"time\": 1, \"step\": $step, \"images\": $step"
    [ "$name" != 0 ] || printf '{"kind": "train", %s, "epoch": 1, "scalars": {}}\n' "$place" \
      >>"$shared/metrics/000001.jsonl"
    [ "$name" != 0 ] || [ "$step" -lt "$steps" ] || write_result
    sleep_unless_stopped {beat}
  done
  write_status ended done '"ended": true'
}

write_result() {
  printf '{"epochs": [{"top1": 50.0, "top5": 90.0}], "top1": 50.0, "top5": 90.0, ' >"$work/end"
  printf '"images_per_second": 1.0, "goodput": 1.0, "seconds": {"training": 1.0, "validation": 0.0}}' >>"$work/end"
  mv "$work/end" "$shared/result.json"
}

case $module in
cluster.machines.python_env)
  sleep {environment}
  printf '{"python": "%s", "seconds": {environment}, "torch": "2", "why": ""}\n' "$stub"
  while [ $# -gt 0 ] && [ "$1" != --then ]; do shift; done
  [ $# = 0 ] || { shift; exec "$stub" -m "$@"; };;
cluster.machines.probe) probe "$@";;
cluster.agent) agent "$@";;
esac
"""


@dataclass(frozen=True, kw_only=True)
class StubDelays:
    """Seconds that each part takes on a machine, as measured on EC2 instances with a warm image.

    `beat` is the heartbeat of the agent. `steps` are the trainer's, one per heartbeat. Machine 0 proposes the first
    attempt when `count` machines have written a status.
    """

    environment: float = 8.0
    probe: float = 2.0
    start: float = 3.0
    beat: float = 1.0
    steps: int = 100_000
    count: int = 1

    def write_script(self, path: Path) -> Path:
        """Write the script, make it executable, and return its path."""
        text = re.sub(r"\{(\w+)\}", lambda match: str(vars(self)[match[1]]), STUB_SCRIPT)
        path.write_text(text)
        path.chmod(0o755)
        return path
