"""GPUs of simulated machines, as far as nvidia-smi shows them: they can fall off the bus, and their driver can hang.

The trainers of these machines compute on processors. What a broken GPU does to them is done here by signals: one that
loses its GPU dies, and one whose driver hangs stands still.
"""

import signal
from pathlib import Path

from support.ssh_machines import send_signal

COUNT_FILE = "gpus"  # how many GPUs answer
# $1: the machine's folder; the rest: the arguments of nvidia-smi. A lost GPU is described as NVIDIA's driver does it.
NVIDIA_SMI = r"""#!/bin/sh
folder=$1 fields=
shift
for word; do
  case $word in --query-gpu=*) fields=${word#*=} ;; esac
done
[ -e "$folder/driver-hangs" ] && exec sleep 100000
read -r answering all <"$folder/gpus"
index=0
while [ "$index" -lt "$answering" ]; do
  row=
  for field in $(echo "$fields" | tr , ' '); do
    case $field in
      index) value=$index ;;
      name) value="Simulated GPU" ;;
      uuid) value=GPU-00000000-0000-0000-0000-00000000000$index ;;
      memory.used | utilization.gpu | temperature.gpu | power.draw) value=1 ;;
      *) value="[N/A]" ;;
    esac
    row="$row${row:+, }$value"
  done
  echo "$row"
  index=$((index + 1))
done
[ "$answering" = "$all" ] && exit 0
echo "Unable to determine the device handle for GPU 0000:00:1E.0: Unknown Error"
exit 15
"""


def install_gpus(folder: Path, commands: Path, count: int) -> None:
    """Give the machine with this folder GPUs, and put nvidia-smi among its commands."""
    script = commands / "nvidia-smi.sh"
    script.write_text(NVIDIA_SMI)
    (folder / COUNT_FILE).write_text(f"{count} {count}\n")
    (commands / "nvidia-smi").write_text(f'#!/bin/sh\nexec sh "{script}" "{folder}" "$@"\n')
    (commands / "nvidia-smi").chmod(0o755)


def break_gpu(folder: Path, trainer_pids: list[int], how: str) -> None:
    """Let one GPU of a machine fall off the bus ("lost"), or its driver hang ("hangs"). Raises `KeyError`."""
    signal_number = {"lost": signal.SIGKILL, "hangs": signal.SIGSTOP}[how]
    if how == "hangs":
        (folder / "driver-hangs").touch()
    else:
        answering, count = map(int, (folder / COUNT_FILE).read_text().split())
        (folder / COUNT_FILE).write_text(f"{answering - 1} {count}\n")
    send_signal(trainer_pids, signal_number)
