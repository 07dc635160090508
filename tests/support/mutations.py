"""Break each rule once and see its test fail: `python tests/support/mutations.py [NAME...]`, those whose names begin so.

Works on a copy of the tree in a temporary folder. First all tests named here must pass there unbroken; then, one after
the other, a text is replaced in one file, its test is run, and must fail. Exits with 1 when a mutation survives. Takes
some minutes; that each text is still where it is looked for is tested with all else (tests/train/rules/test_mutations.py).
"""

import os
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("cluster", "infra", "recipes", "train", "tests", "pyproject.toml", "README.md")
SECONDS = 240  # for one test: also a mutation that makes it hang is seen


@dataclass(frozen=True)
class Mutation:
    """A rule, where it stands, how it is broken there, and the test that sees it (in tests/train/rules/)."""

    name: str
    file: str
    text: str
    broken: str
    test: str

    @property
    def node(self) -> str:
        """The test as pytest names it."""
        return f"tests/train/rules/test_{self.test}"

    @property
    def stands(self) -> bool:
        """Whether the text is in its file exactly once."""
        return (ROOT / self.file).read_text().count(self.text) == 1


LOOP, SCHEDULE, FEED, OPTIM = (
    "train/engine/trainer.py",
    "train/recipe/schedule.py",
    "train/data/order/batch_sampler.py",
    "train/optim/factory.py",
)
MODELS, LAYERWISE, EVALUATE = "train/models/registry.py", "train/optim/layerwise.py", "train/engine/validation.py"
MEAN = "mean.py::test_the_gradient_is_the_mean_over_all_kn_images_of_the_step"
SHAPE = "rates.py::test_a_shape_has_the_rate_of_its_formula_at_every_step"
ORDER = "order.py::test_every_epoch_is_one_permutation_cut_into_the_same_global_batches_for_any_number_of_processes"
GROUPS = "groups.py::test_every_parameter_is_in_one_group_and_decays_unless_it_is_a_norms_or_a_bias"
START = "starts.py::test_the_classifier_starts_at_a_hundredth_and_every_other_norm_at_one"
RESUME = "resume.py::test_a_run_resumed_at_any_step_ends_with_the_same_bits"
RECTANGLE = "validation.py::test_a_rectangle_is_of_whole_32s_and_lies_inside_the_resized_image"
COUNTED = "validation.py::test_a_validation_counts_exactly_all_images_with_fewer_than_there_are_processes_too"
BUG = "bugs_of_2018.py::test_"

MUTATIONS = [
    Mutation(
        "linear scaling: the root instead",
        SCHEDULE,
        '{"linear": k,',
        '{"linear": math.sqrt(k),',
        "rates.py::test_linear_scaling_a_batch_of_k_n_has_k_times_the_rate",
    ),
    Mutation(
        "square-root scaling: k instead",
        SCHEDULE,
        '"sqrt": math.sqrt(k)',
        '"sqrt": k',
        "rates.py::test_square_root_scaling_a_batch_of_k_n_has_the_root_of_k_times_the_rate",
    ),
    Mutation(
        "no scaling: k all the same",
        SCHEDULE,
        '"none": 1.0}',
        '"none": k}',
        "rates.py::test_without_scaling_the_rate_stays",
    ),
    Mutation(
        "gradual warm-up: by the epoch, not the step",
        SCHEDULE,
        "return last / k + (last - last / k) * done",
        "return last / k + (last - last / k) * (step // self.steps_per_epoch * self.steps_per_epoch / self.steps)",
        "rates.py::test_gradual_warmup_adds_a_constant_at_every_step_from_the_base_rate_to_the_scaled_one",
    ),
    Mutation(
        "gradual warm-up: from zero",
        SCHEDULE,
        "return last / k + (last - last / k) * done",
        "return last * done",
        "rates.py::test_gradual_warmup_adds_a_constant_at_every_step_from_the_base_rate_to_the_scaled_one",
    ),
    Mutation(
        "constant warm-up: at the full rate",
        SCHEDULE,
        'case "constant_warmup":\n                return last / k',
        'case "constant_warmup":\n                return last',
        "rates.py::test_constant_warmup_holds_the_base_rate",
    ),
    Mutation(
        "warm-up below 256 images: from above",
        SCHEDULE,
        "k = max(1.0, self.global_batch / REFERENCE_BATCH)",
        "k = self.global_batch / REFERENCE_BATCH",
        "rates.py::test_up_to_256_images_there_is_no_warmup",
    ),
    Mutation(
        "first and last step: one step late",
        SCHEDULE,
        "done = step / (self.steps - 1) if self.steps > 1 else 0.0",
        "done = (step + 1) / self.steps",
        SHAPE,
    ),
    Mutation(
        "linear: bent",
        SCHEDULE,
        "return first * (1 - done) + last * done",
        "return first * (1 - done**2) + last * done**2",
        SHAPE,
    ),
    Mutation(
        "cosine: bent",
        SCHEDULE,
        "return last + (first - last) * (1 + math.cos(math.pi * done)) / 2",
        "return last + (first - last) * (1 + math.cos(math.pi * done**2)) / 2",
        SHAPE,
    ),
    Mutation("polynomial: power 1", SCHEDULE, "POLYNOMIAL_POWER = 2 ", "POLYNOMIAL_POWER = 1 ", SHAPE),
    Mutation("one cycle: its top later", SCHEDULE, "peak / 25 / 1e4, 0.3", "peak / 25 / 1e4, 0.4", SHAPE),
    Mutation(
        "steps: a tenth at the start of each",
        SCHEDULE,
        "first, last = (rate * self.factor for rate in self.phase.rates)",
        "first, last = (rate * self.factor * (0.1 if step == 0 else 1) for rate in self.phase.rates)",
        "rates.py::test_steps_divide_the_rate_by_ten_where_they_are_said_to",
    ),
    Mutation(
        "batch growth: the steps of the first phase",
        SCHEDULE,
        "math.ceil(self.images / (phase.batch * self.gpus))",
        "math.ceil(self.images / (self.recipe.phases[0].batch * self.gpus))",
        "rates.py::test_a_batch_that_doubles_at_a_constant_rate_halves_the_steps_and_the_rate_per_image",
    ),
    Mutation(
        "larger images: no restart",
        "recipes/resnet50_18min.py",
        "Phase(epochs=(14, 17), size=224, batch=128, lr=1.92,",
        "Phase(epochs=(14, 17), size=224, batch=128, lr=0.96,",
        "rates.py::test_larger_images_restart_the_rate",
    ),
    Mutation(
        "restart: the steps of earlier rows count",
        SCHEDULE,
        "(self.number - self.row.phase.epochs[0])",
        "self.number",
        "rates.py::test_a_restart_begins_its_shape_anew",
    ),
    Mutation(
        "momentum correction: applied where none is needed",
        OPTIM,
        '        group["lr"] = rate',
        '        group["momentum"] = group.get("momentum", 0.9) * (rate / group["lr"] if group["lr"] else 1.0)\n'
        '        group["lr"] = rate',
        "momentum.py::test_a_run_is_that_of_equation_9_through_warm_up_jump_and_decay",
    ),
    Mutation(
        "momentum correction: the absorbed form without its factor",
        OPTIM,
        '        group["lr"] = rate',
        '        for one in group["params"]:\n'
        '            if group["lr"] and "momentum_buffer" in optimizer.state[one]:\n'
        '                optimizer.state[one]["momentum_buffer"].mul_(group["lr"] / rate)\n'
        '        group["lr"] = rate',
        "momentum.py::test_our_sgd_is_the_corrected_form_without_a_correction",
    ),
    Mutation(
        "momentum correction: LARS absorbs the rate",
        "train/optim/lars.py",
        "torch._foreach_add_(buffers, steps)\n",
        'torch._foreach_mul_(steps, group["lr"])\n        torch._foreach_add_(buffers, steps)\n'
        '        group = {**group, "lr": 1.0}\n',
        "momentum.py::test_our_lars_is_the_corrected_form_too",
    ),
    Mutation(
        "remark 3: the mean of each worker's mean",
        LOOP,
        "loss * (factor / images)",
        "loss * (factor / (len(labels) * count * self.group.world))",
        MEAN,
    ),
    Mutation(
        "remark 3: 1/n instead of 1/kn over processes",
        LOOP,
        "factor = 1 if self.options.exact else self.group.world",
        "factor = self.group.world**2",
        MEAN,
    ),
    Mutation(
        "remark 3: a lone image counts twice",
        FEED,
        "weight / 2) if len(chunk) == 1",
        "weight) if len(chunk) == 1",
        MEAN,
    ),
    Mutation("remark 3: who repeats a chunk counts", FEED, "[(step_chunks[0], 0.0)]", "[(step_chunks[0], 1.0)]", MEAN),
    Mutation(
        "remark 3: sums over processes before the last chunk",
        LOOP,
        "with self.quiet(unless=number == count):",
        "with self.quiet(unless=number == 1):",
        MEAN,
    ),
    Mutation(
        "accumulation: each chunk's own mean is added up",
        LOOP,
        "loss * (factor / images)",
        "loss * (factor / len(labels))",
        "mean.py::test_accumulated_small_batches_are_one_large_batch",
    ),
    Mutation(
        "remark 1: the loss is scaled as the rate is",
        LOOP,
        "loss * (factor / images)",
        "loss * (factor / images) * epoch.row.factor",
        "mean.py::test_k_workers_scale_the_rate_and_with_it_the_decay_but_not_the_loss",
    ),
    Mutation(
        "remark 1: the loss scale stays in the gradient",
        LOOP,
        "self.scaler.step(self.optimizer)",
        "self.optimizer.step()",
        "mean.py::test_a_loss_that_is_scaled_for_half_precision_moves_the_weights_as_if_it_were_not",
    ),
    Mutation(
        "remark 4: a shuffle for each process",
        FEED,
        "permutation(self.seed, epoch.number,",
        "permutation(self.seed + self.rank, epoch.number,",
        ORDER,
    ),
    Mutation(
        "remark 4: one shuffle for all epochs",
        FEED,
        "permutation(self.seed, epoch.number,",
        "permutation(self.seed, 0,",
        "order.py::test_each_epoch_has_a_shuffle_of_its_own",
    ),
    Mutation(
        "remark 4: batches overlap",
        FEED,
        "start = step * epoch.scheduled_phase.global_batch",
        "start = step * epoch.scheduled_phase.global_batch - (step > 0)",
        ORDER,
    ),
    Mutation(
        "batch norm: two workers' images at once",
        SCHEDULE,
        "count = math.ceil(length / batch)",
        "count = math.ceil(length / batch / 2)",
        "batchnorm.py::test_a_norm_sees_the_n_images_of_one_worker_whatever_k_is_and_however_it_is_carried_out",
    ),
    Mutation(
        "batch norm: chunks by the number of processes",
        FEED,
        "step_chunks = [ids[part] for part in",
        "step_chunks = [np.roll(ids, self.world_size)[part] for part in",
        "batchnorm.py::test_the_gradient_through_norms_is_the_same_on_any_number_of_processes",
    ),
    Mutation(
        "batch norm: statistics not averaged",
        LOOP,
        "distributed.average_statistics(self.group, self.model)",
        "pass",
        "batchnorm.py::test_before_a_validation_all_processes_have_the_mean_of_all_statistics",
    ),
    Mutation(
        "batch norm: statistics summed",
        "train/distributed/process_group.py",
        "total(group, flat) / group.world",
        "total(group, flat)",
        "batchnorm.py::test_before_a_validation_all_processes_have_the_mean_of_all_statistics",
    ),
    Mutation(
        "zero gamma: not set",
        MODELS,
        "if model.zero_gamma and",
        "if not model.zero_gamma and",
        "starts.py::test_at_the_start_every_residual_block_is_its_shortcut",
    ),
    Mutation("zero gamma: of another norm", "train/models/resnet.py", "return self.norm3", "return self.norm2", START),
    Mutation(
        "He's spread: of the inputs",
        MODELS,
        'mode="fan_out"',
        'mode="fan_in"',
        "starts.py::test_convolutions_start_with_hes_spread",
    ),
    Mutation("classifier: twice the spread", MODELS, "std=model.fc_std or 0.0", "std=2 * (model.fc_std or 0.0)", START),
    Mutation(
        "SGD: no Nesterov",
        OPTIM,
        "torch.optim.SGD(parts, lr=0.0, momentum=optim.momentum, nesterov=optim.nesterov)",
        "torch.optim.SGD(parts, lr=0.0, momentum=optim.momentum)",
        "optimizers.py::test_sgd_is_the_formula",
    ),
    Mutation(
        "LARS: decay not in the ratio",
        "train/optim/lars.py",
        "norms(gradients) + decay * lengths",
        "norms(gradients)",
        "optimizers.py::test_lars_is_the_formula_and_skips_norms_and_biases",
    ),
    Mutation(
        "LARS: no decay in the step",
        "train/optim/lars.py",
        "torch._foreach_add(gradients, weights, alpha=decay)",
        "torch._foreach_add(gradients, weights, alpha=0.0)",
        "optimizers.py::test_lars_is_the_formula_and_skips_norms_and_biases",
    ),
    Mutation(
        "LARS: norms and biases are not skipped",
        OPTIM,
        '{**rest, "adapt": False}',
        '{**rest, "adapt": True}',
        "optimizers.py::test_lars_is_the_formula_and_skips_norms_and_biases",
    ),
    Mutation(
        "LARS and LAMB: a layer of zeros stays",
        LAYERWISE,
        "torch.ones_like(above)",
        "torch.zeros_like(above)",
        "optimizers.py::test_a_layer_of_zeros_moves_by_the_plain_step_instead_of_standing_still_for_ever",
    ),
    Mutation(
        "LARS and LAMB: in half precision",
        LAYERWISE,
        "return tensor.float() if tensor.dtype in HALF else tensor",
        "return tensor",
        "optimizers.py::test_layerwise_ratios_are_computed_in_single_precision_at_least",
    ),
    Mutation(
        "LARS: as long as the gradient",
        "train/optim/lars.py",
        'if group["adapt"]:',
        "if False:",
        "optimizers.py::test_the_step_of_lars_is_as_long_as_trust_says_whatever_the_gradient",
    ),
    Mutation(
        "LAMB: the second moment's bias stays",
        "train/optim/lamb.py",
        '[1 - b2 ** state["step"] for state in states]',
        "[1.0 for state in states]",
        "optimizers.py::test_lamb_is_the_formula_and_skips_norms_and_biases",
    ),
    Mutation(
        "LAMB: as long as Adam's step",
        "train/optim/lamb.py",
        "scale(steps, norms(weights), norms(steps))",
        "pass",
        "optimizers.py::test_lamb_is_the_formula_and_skips_norms_and_biases",
    ),
    Mutation(
        "AdamW: decay in the gradient",
        OPTIM,
        "torch.optim.AdamW(parts",
        "torch.optim.Adam(parts",
        "optimizers.py::test_adamw_is_the_formula",
    ),
    Mutation("no decay on norms: it is", OPTIM, '"norm": optim.norm_decay and not skip', '"norm": True', GROUPS),
    Mutation(
        "no decay on biases: by the plain name only",
        OPTIM,
        r'BIAS = re.compile(r"(^|_)bias(_|$)")',
        'BIAS = re.compile(r"^bias$")',
        GROUPS,
    ),
    Mutation(
        "every parameter: shared ones once for each name",
        OPTIM,
        "in model.named_parameters():",
        "in model.named_parameters(remove_duplicate=False):",
        GROUPS,
    ),
    Mutation(
        "every parameter: norms by their names",
        OPTIM,
        "isinstance(module, NORMS) or (NORM.search(type(module).__name__) and parameter.squeeze().ndim <= 1)",
        '"norm" in name or "bn" in name',
        GROUPS,
    ),
    Mutation(
        "every parameter: norms of the stem only",
        OPTIM,
        'return "norm"',
        'return "norm" if module.affine and name.startswith("stem") else "weight"',
        "groups.py::test_of_our_networks_only_the_classifiers_bias_is_no_norms_among_the_vectors",
    ),
    Mutation(
        "label smoothing: none",
        "train/optim/losses.py",
        'partial(cross_entropy, reduction="none", label_smoothing=optim.label_smoothing)',
        'partial(cross_entropy, reduction="none")',
        "losses.py::test_cross_entropy_with_label_smoothing",
    ),
    Mutation(
        "binary cross entropy: the sum over the classes",
        "train/optim/losses.py",
        'reduction="none").mean(1)',
        'reduction="none").sum(1)',
        "losses.py::test_binary_cross_entropy_asks_each_class_on_its_own",
    ),
    Mutation(
        "a loss for each image: their mean",
        "train/optim/losses.py",
        'reduction="none").mean(1)',
        'reduction="none").mean().expand(len(labels))',
        "losses.py::test_a_loss_is_told_for_each_image_so_that_the_step_can_divide_by_all_of_them",
    ),
    Mutation(
        "validation: padded to equal shares",
        "train/data/order/rect_val.py",
        "rank_ids = np.arange(rank, image_count, world_size, dtype=np.int64)",
        "rank_ids = np.arange(rank, -(-image_count // world_size) * world_size, world_size) % image_count",
        COUNTED,
    ),
    Mutation(
        "validation: each process for itself", EVALUATE, "total(group, counts).tolist()", "counts.tolist()", COUNTED
    ),
    Mutation(
        "validation: two processes take the same rectangles",
        "train/data/order/rect_val.py",
        "(rank - begin) % world_size",
        "max(0, rank - begin % world_size)",
        "validation.py::test_square_or_rectangular_each_image_is_asked_for_once",
    ),
    Mutation(
        "validation: in training mode",
        EVALUATE,
        "    model.eval()\n",
        "",
        "validation.py::test_the_scores_of_validation_are_of_a_net_in_eval_mode",
    ),
    Mutation(
        "rectangles: of any multiple of 8",
        "train/data/order/rect_val.py",
        "SIDE_MULTIPLE = 32 ",
        "SIDE_MULTIPLE = 8 ",
        RECTANGLE,
    ),
    Mutation(
        "rectangles: longer than the image",
        "train/data/order/rect_val.py",
        "multiples * SIDE_MULTIPLE)",
        "multiples * SIDE_MULTIPLE + SIDE_MULTIPLE)",
        RECTANGLE,
    ),
    Mutation(
        "rectangles: a batch has the mean shape",
        "train/data/order/rect_val.py",
        "shape = _crop_shape(short, int(long_sides[begin]))",
        "shape = _crop_shape(short, int(long_sides.mean()))",
        "validation.py::test_a_batch_of_rectangles_has_one_shape_that_is_each_images_own",
    ),
    Mutation(
        "resume: momenta forgotten", LOOP, '        self.optimizer.load_state_dict(state["optimizer"])\n', "", RESUME
    ),
    Mutation(
        "resume: at the epoch's start",
        LOOP,
        'self.epoch, self.step = state["epoch"], state["step"]',
        'self.epoch, self.step = state["epoch"], 0',
        RESUME,
    ),
    Mutation(
        "resume: everybody takes the first one's statistics",
        "train/distributed/process_group.py",
        "mine = stored[group.rank] if",
        "mine = stored[0] if",
        RESUME,
    ),
    Mutation(
        "bug 1: every second tensor",
        OPTIM,
        "in model.named_parameters():",
        "in list(model.named_parameters())[::2]:",
        f"{BUG}1_single_precision_trained_every_second_tensor_and_got_half_inputs",
    ),
    Mutation(
        "bug 1: half inputs",
        "train/engine/inputs.py",
        "images.to(self.dtype).sub_(self.mean)",
        "images.half().sub_(self.mean)",
        f"{BUG}1_single_precision_trained_every_second_tensor_and_got_half_inputs",
    ),
    Mutation(
        "bug 2: fresh weights",
        LOOP,
        '        self.model.load_state_dict(state["model"])\n',
        "",
        f"{BUG}2_a_resumed_run_began_with_fresh_weights_and_only_at_a_phases_start",
    ),
    Mutation(
        "bug 2: a fresh loss scale",
        LOOP,
        '        self.scaler.load_state_dict(state["scaler"])\n',
        "",
        f"{BUG}2_a_resumed_run_began_with_fresh_weights_and_only_at_a_phases_start",
    ),
    Mutation(
        "bug 3: saved when the accuracy is high",
        LOOP,
        "        self.save(wait=self.reached or",
        '        if (self.history[-1]["top5"] or 0.0) > 93: self.save(wait=self.reached or',
        f"{BUG}3_checkpoints_were_written_when_the_accuracy_was_high_by_every_machine_to_wherever_it_stood",
    ),
    Mutation(
        "bug 3: saved where one stands",
        LOOP,
        'checkpoint.Saver(self.options.out / "checkpoints" /',
        'checkpoint.Saver(__import__("pathlib").Path("checkpoints") /',
        f"{BUG}3_checkpoints_were_written_when_the_accuracy_was_high_by_every_machine_to_wherever_it_stood",
    ),
    Mutation(
        "bug 4: a crash ends with 0",
        "train/engine/agent_channel.py",
        "os._exit(1)",
        "os._exit(0)",
        f"{BUG}4_a_process_that_crashed_ended_with_0",
    ),
    Mutation(
        "bug 4: bad data ends with 0",
        "train/__main__.py",
        "os._exit(1)",
        "os._exit(0)",
        f"{BUG}4_a_process_that_crashed_ended_with_0",
    ),
    Mutation(
        "bug 4: the parent does not say it",
        "train/__main__.py",
        "return abs(bad[0]) if bad else 0",
        "return 0",
        f"{BUG}4_and_the_others_hung",
    ),
    Mutation(
        "bug 4: the others go on",
        "train/__main__.py",
        "        spawn.kill(children)\n",
        "        pass\n",
        f"{BUG}4_and_the_others_hung",
    ),
    Mutation(
        "bug 5: machines stop",
        "infra/aws/instances/request.py",
        '"InstanceInitiatedShutdownBehavior": "terminate"',
        '"InstanceInitiatedShutdownBehavior": "stop"',
        f"{BUG}5_machines_that_were_shut_down_went_on_to_be_paid_for",
    ),
    Mutation(
        "bug 5: without sudo",
        "cluster/agent/watchdog.py",
        'words = ["sudo", "-n", "imgnet-limit"',
        'words = ["imgnet-limit"',
        f"{BUG}5_machines_that_were_shut_down_went_on_to_be_paid_for",
    ),
    Mutation(
        "bug 6: files are run",
        "train/tools/checkpoint_io.py",
        "weights_only=True",
        "weights_only=False",
        f"{BUG}6_what_came_by_the_command_line_or_from_a_server_was_run_as_code",
    ),
    Mutation(
        "bug 6: a recipe's rows are evaluated",
        "train/recipe/schema.py",
        'for row in value["phases"]',
        'for row in (eval(value["phases"]) if isinstance(value["phases"], str) else value["phases"])',
        f"{BUG}6_what_came_by_the_command_line_or_from_a_server_was_run_as_code",
    ),
    Mutation(
        "bug 7: a view of what is not contiguous",
        "train/metrics/log_writer.py",
        "best[:, 0], best.any(1)",
        "best[:, 0], best.t()[:5].view(-1)",
        f"{BUG}7_the_accuracy_was_computed_by_what_newer_libraries_refuse",
    ),
    Mutation(
        "bug 8: nobody looks for an overflow",
        LOOP,
        "self.scaler.step(self.optimizer)",
        "self.scaler.unscale_(self.optimizer), self.optimizer.step()",
        f"{BUG}8_an_overflow_on_one_machine_became_everybodys_weights",
    ),
    Mutation(
        "bug 8: on with a loss that is no number",
        LOOP,
        "if not math.isfinite(loss):",
        "if False:",
        f"{BUG}8_and_a_run_whose_loss_is_no_number_goes_no_further",
    ),
    Mutation(
        "bug 8: no scale for half precision",
        "train/distributed/ddp.py",
        "enabled=precision == torch.float16",
        "enabled=False",
        f"{BUG}8_and_half_precision_has_a_scale_that_moves",
    ),
]


def copied(folder: Path) -> Path:
    """A copy of the tree."""
    skip = shutil.ignore_patterns("__pycache__", ".*", "*.egg-info", "node_modules")
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=skip)
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


def be_pytest(tree: Path, nodes: tuple[str, ...], said: Path) -> None:
    """Be pytest in a tree, with its code: nothing of ours was imported before the fork."""
    os.setsid()
    output = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(tree)
    # Without bytecode: a file that is changed twice in a second, to the same length, would be taken from it.
    sys.dont_write_bytecode = True
    sys.path[:] = [str(tree), str(tree / "tests"), *(one for one in sys.path if Path(one) != ROOT / "tests")]
    os.environ |= {"PYTHONPATH": f"{tree}{os.pathsep}{tree / 'tests'}", "PYTHONDONTWRITEBYTECODE": "1"}
    code: int = 99
    try:
        code = pytest.main(["-x", "-q", "--durations=0", "--tb=line", "-p", "no:cacheprovider", *nodes])
    finally:
        sys.stdout.flush()
        os._exit(code)


def run(tree: Path, *nodes: str) -> tuple[int, str]:
    """Run tests of a tree on its own code. Returns pytest's exit code (1: a test failed) and what it said."""
    said, deadline = tree / "said", time.monotonic() + SECONDS * max(1, len(nodes))
    pid = os.fork()  # torch is there already: to import it takes longer than most of these tests
    if not pid:
        be_pytest(tree, nodes, said)
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status), said.read_text(errors="replace")
        if time.monotonic() > deadline:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return 1, "it hangs"
        time.sleep(0.05)


def attempt(tree: Path, one: Mutation) -> str:
    """Break the rule in the tree, run its test, mend it again. Returns "caught", "SURVIVED" or what went wrong."""
    path = tree / one.file
    before = path.read_text()
    if before.count(one.text) != 1:
        return "NOT FOUND"
    path.write_text(before.replace(one.text, one.broken))
    try:
        code, said = run(tree, one.node)
    finally:
        path.write_text(before)
    if code == 1:
        return "caught"
    return "SURVIVED" if code == 0 else f"pytest ended with {code}: {said.strip().splitlines()[-1:]}"


def main(names: list[str]) -> int:
    """Try those mutations whose names begin with one of these; all without names."""
    import torch._dynamo
    import torch.utils.tensorboard

    chosen = [one for one in MUTATIONS if not names or one.name.startswith(tuple(names))]
    with tempfile.TemporaryDirectory(prefix="imgnet-mutations-") as folder:
        tree = copied(Path(folder))
        code, said = run(tree, *dict.fromkeys(one.node for one in chosen))
        if code:
            print(said, f"unbroken, the tests must pass; pytest ended with {code}", sep="\n")
            return 1
        print(f"{len(chosen)} mutations; unbroken, their tests pass\n", flush=True)
        print("| rule: how it is broken | in | seen by | |\n|---|---|---|---|", flush=True)
        found = []
        for one in chosen:
            begun = time.monotonic()
            found.append(attempt(tree, one))
            seconds = time.monotonic() - begun
            print(f"| {one.name} | {one.file} | {one.test} | {found[-1]}, {seconds:.0f} s |", flush=True)
    survived = [one for one in found if one != "caught"]
    print(f"\n{len(found) - len(survived)} caught, {len(survived)} not", flush=True)
    return bool(survived)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
