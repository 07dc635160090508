"""Starts one trainer process per GPU on this machine and waits for them."""

import signal
import time

from train.tools import process


def _gpu_count() -> int:
    import torch  # seconds, which a parent that is told --procs need not wait for

    return torch.cuda.device_count()


def launch_ranks(argv: list[str], procs: int) -> int:
    """Start the processes and wait; when one fails, end the others. Returns the first bad exit code."""
    children = process.spawn_ranks(argv, procs, master_port=process.free_port())

    def pass_on(number: int, _: object) -> None:  # so that they save: killed with us, they would not
        for one in children:
            one.send_signal(number)

    signal.signal(signal.SIGTERM, pass_on)
    try:
        while True:
            codes = [one.poll() for one in children]
            bad = [code for code in codes if code]
            if bad or None not in codes:
                return abs(bad[0]) if bad else 0
            time.sleep(0.05)
    except KeyboardInterrupt:
        return 130
    finally:
        process.kill_process_groups(children)
