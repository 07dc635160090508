"""Mutation test of the training rules: break each rule once in a copy of the tree and check that its test fails.

    python tests/support/mutations.py [NAME...]      all mutations, or those whose names begin with NAME

First, all tests named here must pass on the unbroken copy. Then, one mutation after the other, a text is replaced in
one file, its test is run, and must fail. Exits with 1 when a mutation survives. Takes some minutes. That each text
still occurs in its file, and that each test exists, is checked by tests/train/rules/test_mutations.py.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("cluster", "infra", "recipes", "train", "tests", "pyproject.toml", "README.md")
TEST_TIMEOUT_SECONDS = 240  # a mutation that makes its test hang counts as caught


@dataclass(frozen=True)
class Mutation:
    """A rule, the text of a file that implements it, a broken replacement, and the test that must notice it.

    `test` is the test's node id: below tests/train/rules, or below tests where it names a folder.
    """

    name: str
    file: str
    text: str
    broken: str
    test: str

    @property
    def node(self) -> str:
        return f"tests/{self.test}" if "/" in self.test else f"tests/train/rules/{self.test}"

    @property
    def text_is_unique(self) -> bool:
        return (ROOT / self.file).read_text().count(self.text) == 1


TRAINER = "train/engine/trainer.py"
VALIDATION = "train/engine/validation.py"
LAUNCHER = "train/tools/process.py"
SCHEDULE = "train/recipe/schedule.py"
SAMPLER = "train/data/order/batch_sampler.py"
RECT_VAL = "train/data/order/rect_val.py"
OPTIMIZER = "train/optim/factory.py"
LAYERWISE = "train/optim/layerwise.py"
LOSSES = "train/optim/losses.py"
MODELS = "train/models/registry.py"
BATCHNORM = "train/distributed/batchnorm.py"
GRAPHS = "train/distributed/cuda_graphs.py"

# By the test that must notice it: the rule and how it is broken, the file, its text, the broken text.
TABLE: dict[str, list[tuple[str, str, str, str]]] = {
    "test_rates.py::test_scaling_rule_multiplies_lr": [
        ("linear scaling: by the square root", SCHEDULE, '{"linear": k,', '{"linear": math.sqrt(k),'),
        ("square-root scaling: by k", SCHEDULE, '"sqrt": math.sqrt(k)', '"sqrt": k'),
        ("no scaling: by k", SCHEDULE, '"none": 1.0}', '"none": k}'),
    ],
    "test_rates.py::test_warmup_leads_from_base_to_scaled_lr": [
        ("gradual warm-up: per epoch, not per step", SCHEDULE,
         "return last / k + (last - last / k) * done",
         "return last / k + (last - last / k) * (step // self.steps_per_epoch * self.steps_per_epoch / self.steps)"),
        ("gradual warm-up: from zero", SCHEDULE, "return last / k + (last - last / k) * done", "return last * done"),
        ("constant warm-up: at the full learning rate", SCHEDULE,
         'case "constant_warmup":\n                return last / k',
         'case "constant_warmup":\n                return last'),
        ("step decay: a tenth in the first step of each phase", SCHEDULE,
         "first, last = (lr * self.lr_factor for lr in self.phase.lr_endpoints)",
         "first, last = (lr * self.lr_factor * (0.1 if step == 0 else 1) for lr in self.phase.lr_endpoints)"),
    ],
    "test_rates.py::test_warmup_has_no_effect_on_256_images_or_fewer": [
        ("warm-up below 256 images: from a higher learning rate", SCHEDULE,
         "k = max(1.0, self.global_batch / REFERENCE_BATCH)", "k = self.global_batch / REFERENCE_BATCH"),
    ],
    "test_rates.py::test_lr_shape_matches_formula_at_every_step": [
        ("first and last step: one step late", SCHEDULE,
         "done = step / (self.steps_of_phase - 1) if self.steps_of_phase > 1 else 0.0",
         "done = (step + 1) / self.steps_of_phase"),
        ("linear shape: bent", SCHEDULE,
         "else first * (1 - done) + last * done", "else first * (1 - done**2) + last * done**2"),
        ("cosine shape: bent", SCHEDULE,
         "return last + (first - last) * (1 + math.cos(math.pi * done)) / 2",
         "return last + (first - last) * (1 + math.cos(math.pi * done**2)) / 2"),
        ("polynomial shape: power 1", SCHEDULE, "POLYNOMIAL_POWER = 2 ", "POLYNOMIAL_POWER = 1 "),
        ("one-cycle shape: later peak", SCHEDULE, "peak_lr / 25 / 1e4, ONE_CYCLE_PEAK", "peak_lr / 25 / 1e4, 0.4"),
        ("restart: the steps of earlier phases count", SCHEDULE,
         "(self.number - self.scheduled_phase.phase.epochs[0])", "self.number"),
    ],
    "test_networks.py::test_filter_is_tri_3_and_removes_the_nyquist_frequency": [
        ("BlurPool: a box filter", "train/models/resnet.py",
         "BLUR_WEIGHTS = (1.0, 2.0, 1.0)", "BLUR_WEIGHTS = (1.0, 1.0, 1.0)"),
    ],
    "test_networks.py::test_every_strided_convolution_but_the_first_takes_a_blurred_input": [
        ("BlurPool: shortcuts are left out", "train/models/resnet.py",
         "max(child.stride) > 1 and child.in_channels >= MIN_BLURRED_CHANNELS",
         "max(child.stride) > 1 and child.in_channels >= MIN_BLURRED_CHANNELS and max(child.kernel_size) > 1"),
        ("BlurPool: the filter is in the state of the network", "train/models/resnet.py",
         'self.register_buffer("kernel", kernel, persistent=False)', 'self.register_buffer("kernel", kernel)'),
    ],
    "test_weight_average.py::test_average_is_that_of_tensorflow_is_validated_and_leaves_training_alone": [
        ("averaged weights: the full decay from the first step", "train/optim/weight_average.py",
         "min(self.decay, (1 + step) / (10 + step))", "self.decay"),
        ("averaged weights: weight and average exchanged", "train/optim/weight_average.py",
         "1 - min(self.decay, (1 + step) / (10 + step))", "min(self.decay, (1 + step) / (10 + step))"),
        ("averaged weights: the last weights are validated", TRAINER,
         "measure(TimePart.VALIDATION), self.average.in_model():", "measure(TimePart.VALIDATION):"),
    ],
    "test_weight_average.py::test_k_times_the_gpus_raise_the_decay_to_the_power_k": [
        ("averaged weights: the same decay for larger batches", SCHEDULE,
         "return float(optim.ema ** (self.gpus / self.recipe.nominal_gpus))", "return optim.ema"),
    ],
    "test_rates.py::test_size_grows_as_in_ffcv": [
        ("growing size: rounded down", "train/recipe/schema.py",
         "return round(size / SIZE_STEP) * SIZE_STEP", "return int(size / SIZE_STEP) * SIZE_STEP"),
    ],
    "test_rates.py::test_size_grows_in_equal_stages_and_leaves_the_rates_alone": [
        ("growing size: the learning rate starts again with each size", SCHEDULE,
         "done = step / (self.steps_of_phase - 1) if self.steps_of_phase > 1 else 0.0",
         "done = step / (self.steps - 1) if self.steps > 1 else 0.0"),
    ],
    "test_gradient_mean.py::test_trainer_follows_equation_9_through_lr_jumps": [
        ("batch growth: the steps of the first phase", SCHEDULE,
         "math.ceil(self.images / (phase.batch * self.gpus))",
         "math.ceil(self.images / (self.recipe.phases[0].batch * self.gpus))"),
        ("momentum correction: applied where none is needed", OPTIMIZER,
         '        group["lr"] = lr',
         '        group["momentum"] = group.get("momentum", 0.9) * (lr / group["lr"] if group["lr"] else 1.0)\n'
         '        group["lr"] = lr'),
    ],
    "test_gradient_mean.py::test_step_gradient_is_mean_over_all_images_of_the_global_batch": [
        ("remark 3: the mean of each worker's mean", TRAINER,
         "loss * (factor / images)", "loss * (factor / (len(labels) * chunk_count * self.group.world_size))"),
        ("remark 3: 1/n instead of 1/kn over processes", TRAINER,
         "factor = 1 if self.options.exact else self.group.world_size", "factor = self.group.world_size**2"),
        ("remark 3: a repeated single image counts twice", SAMPLER, " / 2) if len(", ") if len("),
        ("remark 3: a chunk repeated by an idle rank counts", SAMPLER, "[0], 0.0)]", "[0], 1.0)]"),
        ("remark 3: all-reduce before the last chunk", TRAINER,
         "with ddp.without_sums(self.wrapped_model, unless=number == chunk_count):",
         "with ddp.without_sums(self.wrapped_model, unless=number == 1):"),
        ("accumulation: the sum of the chunks' means", TRAINER,
         "loss * (factor / images)", "loss * (factor / len(labels))"),
    ],
    "test_gradient_mean.py::test_linear_scaling_applies_to_lr_and_decay_but_not_to_the_loss": [
        ("remark 1: the loss is scaled like the learning rate", TRAINER,
         "loss * (factor / images)", "loss * (factor / images) * epoch.scheduled_phase.lr_factor"),
    ],
    "test_gradient_mean.py::test_loss_scale_does_not_change_the_update": [
        ("remark 1: the loss scale stays in the gradient", OPTIMIZER,
         "scaler.step(optimizer)", "optimizer.step()"),
    ],
    "test_gradient_mean.py::test_clipped_gradient_is_that_of_the_whole_batch_without_loss_scale_and_decay": [
        ("clipping: the loss scale is part of the norm", OPTIMIZER, "        scaler.unscale_(optimizer)\n", ""),
    ],
    "test_order.py::test_epoch_permutation_is_cut_into_same_batches_on_any_world_size": [
        ("remark 4: a shuffle for each process", SAMPLER,
         "permutation(self.seed, epoch.number,", "permutation(self.seed + self.rank, epoch.number,"),
        ("remark 4: one shuffle for all epochs", SAMPLER,
         "permutation(self.seed, epoch.number,", "permutation(self.seed, 0,"),
        ("remark 4: batches overlap", SAMPLER,
         "start = step * epoch.scheduled_phase.global_batch",
         "start = step * epoch.scheduled_phase.global_batch - (step > 0)"),
    ],
    "test_batchnorm.py::test_norms_keep_their_own_momentum_and_eval_mode": [
        ("batch norm: one momentum for all norms", BATCHNORM,
         "if first is not None and all(momentum == first for momentum in self.trained_momenta):",
         "if first is not None:"),
        ("batch norm: statistics of norms in eval mode are trained", BATCHNORM, "if norm.training:", "if norm:"),
    ],
    "test_batchnorm.py::test_no_norm_counts_its_steps_on_the_gpu": [
        ("batch norm: counts on a GPU", BATCHNORM, "= norm.num_batches_tracked.cpu()", "= norm.num_batches_tracked"),
        ("batch norm: counts not saved", BATCHNORM, "norm.num_batches_tracked.cpu()", "None"),
    ],
    "test_batchnorm.py::test_statistics_of_norms_that_are_not_torchs_are_averaged_before_validation": [
        ("batch norm: norms that are not torch's are not averaged", BATCHNORM,
         "for buffer, total in zip(self.foreign_buffers, sums, strict=True):", "for buffer, total in ():"),
        ("batch norm: statistics of other norms summed", BATCHNORM,
         "total / self.group.world_size", "total"),
    ],
    "test_batchnorm.py::test_norm_sees_one_workers_images_and_its_statistics_move_once_a_step": [
        ("batch norm: two workers' images at once", SCHEDULE,
         "count = math.ceil(image_count / max_chunk)", "count = math.ceil(image_count / max_chunk / 2)"),
        ("batch norm: chunks depend on the number of processes", SAMPLER,
         "[ids[part] for part in", "[np.roll(ids, self.world_size)[part] for part in"),
        ("batch norm: statistics not summed over processes", TRAINER, "self.running_statistics.start_sum()", "pass"),
        ("batch norm: statistics of a step not averaged over its chunks", BATCHNORM,
         "self.chunk_sum / chunk_count", "self.chunk_sum"),
    ],
    "test_networks.py::test_zero_gamma_makes_every_block_its_shortcut": [
        ("zero gamma: not set", MODELS, "if model.zero_gamma and", "if not model.zero_gamma and"),
    ],
    "test_networks.py::test_classifier_starts_at_std_0_01_and_other_norms_at_one": [
        ("zero gamma: in another norm", "train/models/resnet.py", "return self.bn3", "return self.bn2"),
        ("classifier: twice the standard deviation", MODELS,
         "std=model.fc_std or 0.0", "std=2 * (model.fc_std or 0.0)"),
    ],
    "test_networks.py::test_convolutions_start_with_he_standard_deviation": [
        ("He's standard deviation: by the inputs", MODELS, 'mode="fan_out"', 'mode="fan_in"'),
    ],
    "test_optimizers.py::test_optimizer_matches_its_formula": [
        ("SGD: no Nesterov", OPTIMIZER,
         "momentum=optim.momentum, nesterov=optim.nesterov, fused=fused)", "momentum=optim.momentum, fused=fused)"),
        ("LARS: no decay in the ratio", LAYERWISE, "gradient_norms + decay * lengths", "gradient_norms"),
        ("LARS: no decay in the step", LAYERWISE,
         "torch._foreach_add(gradients, weights, alpha=decay)", "torch._foreach_add(gradients, weights, alpha=0.0)"),
        ("LARS: norms and biases are adapted too", OPTIMIZER, '{**rest, "adapt": False}', '{**rest, "adapt": True}'),
        ("LARS: step as long as the gradient", LAYERWISE,
         'if group["adapt"]:\n            lengths', "if False:\n            lengths"),
        ("LARS in Google's form: no ratio", LAYERWISE, "if ratios and is_google:", "if False:"),
        ("LARS in Google's form: no decay in the norm of the gradients", LAYERWISE,
         "tensor_norms(steps if is_google else gradients)", "tensor_norms(gradients)"),
        ("LAMB: no bias correction of the second moment", LAYERWISE,
         "bias_corrections(b2, states)", "[1.0 for state in states]"),
        ("LAMB: step as long as Adam's", LAYERWISE,
         "norm_ratios(tensor_norms(weights), tensor_norms(steps))", "[1.0 for _ in steps]"),
        ("momentum correction: the absorbed form without its factor", OPTIMIZER,
         '        group["lr"] = lr',
         '        for parameter in group["params"]:\n'
         '            if group["lr"] and "momentum_buffer" in optimizer.state[parameter]:\n'
         '                optimizer.state[parameter]["momentum_buffer"].mul_(group["lr"] / lr)\n'
         '        group["lr"] = lr'),
        ("momentum correction: LARS absorbs the learning rate", LAYERWISE,
         "torch._foreach_add_(buffers, steps)\n",
         'torch._foreach_mul_(steps, group["lr"])\n'
         "        torch._foreach_add_(buffers, steps)\n"
         '        group = {**group, "lr": 1.0}\n'),
        ("AdamW: decay in the gradient", OPTIMIZER, "torch.optim.AdamW(parts", "torch.optim.Adam(parts"),
        ("LARS and LAMB: a layer of zeros stays zero", LAYERWISE,
         "torch.ones_like(numerator)", "torch.zeros_like(numerator)"),
    ],
    "test_optimizers.py::test_step_left_out_for_the_loss_scale_leaves_no_trace": [
        ("LARS and LAMB: a step that is left out moves the momentum", LAYERWISE,
         "            changing += state_tensors(name, weights, states)\n",
         "            state_tensors(name, weights, states)\n"),
        ("LAMB: steps that are left out count in the bias correction", LAYERWISE,
         "beta ** (steps - skipped)", "beta**steps"),
        ("fused SGD: momentum of uninitialized memory", OPTIMIZER, '    if settings["fused"]:\n', "    if False:\n"),
    ],
    "test_param_groups.py::test_parameter_groups_hold_each_parameter_once_with_its_decay": [
        ("parameter groups: norms decay", OPTIMIZER, '"norm": optim.norm_decay and not skip', '"norm": True'),
        ("parameter groups: biases only by their plain name", OPTIMIZER,
         'BIAS_NAME_PATTERN = re.compile(r"(^|_)bias(_|$)")', 'BIAS_NAME_PATTERN = re.compile(r"^bias$")'),
        ("parameter groups: shared parameters once for each name", OPTIMIZER,
         "in model.named_parameters():", "in model.named_parameters(remove_duplicate=False):"),
        ("parameter groups: norms by their names", OPTIMIZER,
         "    if isinstance(module, NORM_TYPES) or (\n"
         "        NORM_NAME_PATTERN.search(type(module).__name__) and parameter.squeeze().ndim <= 1\n"
         "    ):",
         '    if "norm" in name or "bn" in name:'),
        ("parameter groups: only norms of the stem", OPTIMIZER,
         'return "norm"', 'return "norm" if module.affine and name.startswith("stem") else "weight"'),
    ],
    "test_optimizers.py::test_loss_of_each_image_matches_formula": [
        ("label smoothing: none", LOSSES,
         'partial(cross_entropy, reduction="none", label_smoothing=optim.label_smoothing)',
         'partial(cross_entropy, reduction="none")'),
        ("binary cross entropy: the sum over the classes", LOSSES,
         'reduction="none").mean(1)', 'reduction="none").sum(1)'),
        ("one loss per image: the mean for each", LOSSES,
         'reduction="none").mean(1)', 'reduction="none").mean().expand(len(labels))'),
    ],
    "test_validation.py::test_run_validation_counts_each_image_once_on_any_world_size": [
        ("bug 7: a view of a tensor that is not contiguous", "train/metrics/accuracy.py",
         "best[:, 0], best.any(1)", "best[:, 0], best.t()[:5].view(-1)"),
        ("validation: in train mode", VALIDATION, "    model.eval()\n", ""),
        ("validation: padded to equal shares", RECT_VAL,
         "np.arange(rank, image_count, world_size, dtype=np.int64)",
         "np.arange(rank, -(-image_count // world_size) * world_size, world_size, dtype=np.int64) % image_count"),
        ("validation: each process counts only its own images", VALIDATION,
         "read_sum(group, counts).tolist()", "counts.tolist()"),
    ],
    "test_validation.py::test_val_requests_hold_each_image_once_in_its_own_shape": [
        ("validation: two processes take the same rectangles", RECT_VAL,
         "(rank - begin) % world_size", "max(0, rank - begin % world_size)"),
        ("rectangles: a batch has the mean shape of all images", RECT_VAL, "[begin]))", ".mean()))"),
    ],
    "test_validation.py::test_rect_crop_shape_is_multiple_of_32_inside_resized_image": [
        ("rectangles: sides of any multiple of 8", RECT_VAL, "SIDE_MULTIPLE = 32 ", "SIDE_MULTIPLE = 8 "),
        ("rectangles: longer than the image", RECT_VAL,
         "clip(max=MAX_ASPECT_RATIO)", "clip(max=MAX_ASPECT_RATIO) * 1.2"),
    ],
    "test_resume.py::test_resume_at_any_step_gives_the_same_bits": [
        ("resume: momenta are lost", TRAINER, '            self.optimizer.load_state_dict(state["optimizer"])\n', ""),
        ("resume: from the start of the epoch", TRAINER,
         'self.epoch_index, self.step = state["epoch"], state["step"]',
         'self.epoch_index, self.step = state["epoch"], 0'),
        ("resume: running statistics of the last chunk", TRAINER,
         "        self.running_statistics.write_to_norms()\n        return {", "        return {"),
        ("bug 2: new weights", TRAINER, '            resume_check.load_weights(self.model, state["model"])\n', ""),
        ("bug 2: a new loss scale", TRAINER, 'self.scaler.load_state_dict(state["scaler"])', "pass"),
    ],
    "test_resume.py::test_last_network_stays_as_the_best_one_when_a_finished_run_gets_more_epochs": [
        ("more epochs: the best network is lost", "train/engine/run.py",
         "trainer.save(wait=True, is_best=True)", "pass"),
    ],
    "test_bugs_of_2018.py::test_bug_1_single_precision_trains_every_tensor_on_float32_inputs": [
        ("bug 1: every second tensor", OPTIMIZER,
         "in model.named_parameters():", "in list(model.named_parameters())[::2]:"),
        ("bug 1: half-precision inputs", "train/engine/inputs.py",
         "images.to(self.score_dtype).sub_(self.mean)", "images.half().sub_(self.mean)"),
        ("bug 8: no loss scale for float16", "train/distributed/ddp.py",
         "enabled=precision == torch.float16", "enabled=False"),
    ],
    "test_bugs_of_2018.py::test_bug_3_rank_0_saves_every_epoch_into_the_run_folder": [
        ("bug 3: saved only when the accuracy is high", TRAINER,
         "        self.save(wait=is_last, is_best=is_best)",
         "        if (self.history[-1].top5 or 0.0) > 93:\n            self.save(wait=is_last, is_best=is_best)"),
        ("bug 3: saved in the current folder", TRAINER,
         "checkpoint_folder(options.out, ", 'checkpoint_folder(__import__("pathlib").Path("."), '),
    ],
    "test_bugs_of_2018.py::test_bug_4_one_crash_ends_all_processes": [
        ("bug 4: the parent exits with 0", LAUNCHER, "return abs(failures[0])", "return 0"),
        ("bug 4: the other processes go on", LAUNCHER, "        kill_process_groups(ranks)\n", "        pass\n"),
    ],
    "test_bugs_of_2018.py::test_bug_5_watchdog_sets_the_power_off_timer_with_sudo": [
        ("bug 5: without sudo", "cluster/agent/watchdog.py", '["sudo", "-n", "imgnet-limit"', '["imgnet-limit"'),
    ],
    "test_bugs_of_2018.py::test_bug_6_no_input_is_executed_as_code": [
        ("bug 6: checkpoints are executed", "train/tools/checkpoint_io.py", "weights_only=True", "weights_only=False"),
        ("bug 6: a recipe's phases are evaluated", "train/recipe/schema.py",
         'for row in value["phases"]',
         'for row in (eval(value["phases"]) if isinstance(value["phases"], str) else value["phases"])'),
    ],
    "test_bugs_of_2018.py::test_bug_8_overflow_on_one_rank_skips_the_step_on_all": [
        ("bug 8: no check for an overflow", OPTIMIZER,
         "scaler.step(optimizer)", "scaler.unscale_(optimizer), optimizer.step()"),
    ],
    "test_bugs_of_2018.py::test_bug_8_run_with_nan_loss_stops": [
        ("bug 8: goes on with a loss that is not finite", LOSSES, "if not math.isfinite(loss):", "if False:"),
    ],
    "test_bugs_of_2018.py::test_bug_8_collapsing_loss_scale_stops": [
        ("bug 8: goes on with a loss scale that collapses", "train/distributed/ddp.py",
         "if scale < MIN_LOSS_SCALE:", "if False:"),
    ],
    "cluster/backends/test_local.py::test_each_machine_sees_its_share_of_the_gpus": [
        ("GPUs: each machine of one computer sees all", "cluster/backends/local.py",
         "{} if gpus is None else", "{} if True else"),
    ],
    "cluster/state/test_membership.py::test_crashes_in_a_row": [
        ("GPUs: a broken one ends the job of all machines", "cluster/state/membership.py",
         "has_others = 0 < len(left_out_ids) < len(attempt.members)", "has_others = False"),
    ],
    "train/distributed/test_process_group.py::test_join_takes_the_gpu_of_the_local_rank_and_nccl": [
        ("NCCL: its watchdog sleeps a minute before it ends a process", "train/distributed/process_group.py",
         "            for name, value in NCCL_WATCHDOG_VARIABLES.items():", "            for name, value in ():"),
    ],
    "train/engine/test_agent_channel.py::test_excepthook_prints_reports_and_exits": [
        ("CUDA errors: told by their last line", "train/tools/errors.py",
         "CUDA_ERROR_PATTERN.search(text)", "CUDA_ERROR_PATTERN.search(last_line(text))"),
        ("NCCL: all of its failures are those of peers", "train/tools/errors.py",
         "if OWN_NCCL_PATTERN.search(text):", "if False:"),
    ],
    "train/engine/test_warmup.py::test_warm_up_says_what_to_change_when_the_memory_is_full": [
        ("GPU memory: tried again when it is full", "train/distributed/gpu.py",
         "    except torch.OutOfMemoryError as error:", "    except StopIteration as error:"),
    ],
    "train/distributed/test_network.py::test_detect_transport_reads_and_removes_nccl_log": [
        ("NCCL: a missing log ends the job", "train/distributed/network.py",
         "with contextlib.suppress(OSError):  # NCCL could not write it", "if True:  # NCCL could not write it"),
    ],
    "train/distributed/test_process_group.py::test_ranks_on_gpus_exit_only_when_none_sends_any_more": [
        ("NCCL: a process ends while it still sends to others", "train/distributed/process_group.py",
         'store.wait(["all-leave"], EXIT_TIMEOUT)', "pass"),
    ],
    "train/distributed/test_process_group.py::test_gpu_that_torch_cannot_use_ends_one_of_several_machines": [
        ("GPUs: one that torch cannot use trains on the CPU beside others", "train/distributed/process_group.py",
         "raise MachineTrouble(refusal)", "pass"),
    ],
    "train/distributed/test_cuda_graphs.py::test_graphs_train_as_without_them": [
        ("CUDA graphs: a norm counts no steps", GRAPHS, "torch._foreach_add_(self.counters, 1)", "pass"),
        ("CUDA graphs: the capture changes the running statistics", GRAPHS, "buffer.copy_(saved)", "pass"),
    ],
    "train/distributed/test_cuda_graphs.py::test_dropout_of_a_graph_is_that_of_the_step": [
        ("CUDA graphs: a chunk overwrites the gradients of the one before", GRAPHS,
         "parameter.grad = parameter.grad.clone()", "pass"),
    ],
    "train/distributed/test_cuda_graphs.py::test_stages_of_several_processes_train_as_without_graphs": [
        ("CUDA graphs: a stage's gradient of its input is lost", GRAPHS,
         "(self.input_gradient, *self.gradients)", "(None, *self.gradients)"),
    ],
    "train/distributed/test_cuda_graphs.py::test_a_network_whose_graphs_are_wrong_trains_without_them": [
        ("CUDA graphs: only one batch is compared", GRAPHS, "COMPARED_BATCHES = 2", "COMPARED_BATCHES = 1"),
        ("CUDA graphs: nothing is compared behind a norm that begins at zero", GRAPHS, "self._set(zeros, 0.5)", "pass"),
    ],
    "train/distributed/test_cuda_graphs.py::test_all_processes_have_graphs_or_none_has": [
        ("CUDA graphs: some processes have them, others not", GRAPHS,
         "if read_sum(group, torch.tensor([float(bool(self.problem))])).item():", "if self.problem:"),
    ],
    "train/distributed/test_cuda_graphs.py::test_an_attempt_that_died_while_it_captured_leaves_graphs_off": [
        ("CUDA graphs: an attempt that died of them is repeated", GRAPHS, "self.mark.touch()", "pass"),
    ],
}  # fmt: skip
MUTATIONS = [Mutation(*row, test) for test, rows in TABLE.items() for row in rows]


def copy_tree(folder: Path) -> Path:
    ignored = shutil.ignore_patterns("__pycache__", ".*", "*.egg-info", "node_modules")
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


def run_tests(tree: Path, *nodes: str) -> tuple[int, str]:
    """Run tests of a tree on its own code. Returns pytest's exit code (1: a test failed) and its output."""
    # Without bytecode: Python would use the old bytecode of a file that changes twice in a second and keeps its length.
    environment = {**os.environ, "PYTHONPATH": f"{tree}{os.pathsep}{tree / 'tests'}", "PYTHONDONTWRITEBYTECODE": "1"}
    argv = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=line", "-p", "no:cacheprovider", *nodes]
    with subprocess.Popen(
        argv, cwd=tree, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, process_group=0
    ) as process:
        try:
            output, _ = process.communicate(timeout=TEST_TIMEOUT_SECONDS * max(1, len(nodes)))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return 1, "timed out"
    return process.returncode, output


def try_mutation(tree: Path, mutation: Mutation) -> str:
    """Break the rule in the tree, run its test, and restore the file. Returns "caught", "SURVIVED" or a problem."""
    path = tree / mutation.file
    original = path.read_text()
    if original.count(mutation.text) != 1:
        return "NOT FOUND"
    path.write_text(original.replace(mutation.text, mutation.broken))
    try:
        code, output = run_tests(tree, mutation.node)
    finally:
        path.write_text(original)
    if code == 1:
        return "caught"
    return "SURVIVED" if code == 0 else f"pytest ended with {code}: {output.strip().splitlines()[-1:]}"


def main(names: list[str]) -> int:
    """Try the mutations whose names begin with one of these, or all. Returns 1 when one is not caught."""
    chosen = [mutation for mutation in MUTATIONS if not names or mutation.name.startswith(tuple(names))]
    with tempfile.TemporaryDirectory(prefix="imgnet-mutations-") as folder:
        tree = copy_tree(Path(folder))
        code, output = run_tests(tree, *dict.fromkeys(mutation.node for mutation in chosen))
        if code:
            print(output, f"the tests must pass on the unbroken tree; pytest ended with {code}", sep="\n")
            return 1
        print(f"{len(chosen)} mutations; their tests pass on the unbroken tree\n", flush=True)
        print("| rule: how it is broken | file | test | |\n|---|---|---|---|", flush=True)
        results = []
        for mutation in chosen:
            start = time.monotonic()
            results.append(try_mutation(tree, mutation))
            seconds = time.monotonic() - start
            print(
                f"| {mutation.name} | {mutation.file} | {mutation.test} | {results[-1]}, {seconds:.0f} s |", flush=True
            )
    caught = results.count("caught")
    print(f"\n{caught} caught, {len(results) - caught} not", flush=True)
    return int(caught < len(results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
