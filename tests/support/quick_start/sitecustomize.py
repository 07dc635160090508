"""Trainers of tests start without torch._dynamo, when this folder is in PYTHONPATH.

torch.optim imports it at first use, for torch.compile, which these trainers do not use. That is a third of the
processor time of a short job's trainer.
"""

import sys
import types

if sys.orig_argv[1:4] in (["-P", "-m", "train"], ["-P", "-m", "train.engine.standby"]):
    stand_in = types.ModuleType("torch._dynamo")
    stand_in.__dict__.update(
        disable=lambda function, *_, **__: function,
        graph_break=lambda: None,
        trace_rules=types.SimpleNamespace(clear_lru_cache=lambda: None),  # for init_process_group
        utils=types.SimpleNamespace(get_optimize_ddp_mode=lambda: "no_optimization"),  # for DistributedDataParallel
    )
    sys.modules["torch._dynamo"] = stand_in
