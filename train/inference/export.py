"""Writes a trained network for other programs: its weights under the names that they expect, and its classes."""

import importlib.util
from collections.abc import Mapping
from pathlib import Path

import torch

from train.evaluation.protocol import emit_json_line, reserve_stdout
from train.evaluation.trained_network import TrainedNetwork, open_trained
from train.models import resnet
from train.tools.errors import TrainingError, first_line
from train.tools.files import write_atomic, write_atomic_with
from train.tools.records import encode
from train.tools.text_files import to_json_bytes
from train.weights.safetensors_file import write_safetensors

from .protocol import Exported, ExportOptions, FileFormat, ParameterNames

ONNX_PACKAGES = ("onnx", "onnxscript")  # that torch.onnx needs


@reserve_stdout()
def export_network(options: ExportOptions) -> None:
    """Write the network and its classes, and print one message. Raises `TrainingError` and `OSError`."""
    needed = ONNX_PACKAGES if options.format is FileFormat.ONNX else ()
    if missing := [package for package in needed if importlib.util.find_spec(package) is None]:
        packages, words = " ".join(missing), " and ".join(missing)
        raise TrainingError(f"--format onnx needs {words}, not installed here; install: pip install {packages}")
    file = Path(options.file)
    trained = open_trained(Path(options.source), options.model)
    description = trained.description
    weights = named_weights(trained, options.names)
    classes_file = file.with_suffix(".classes.json")
    classes_json = to_json_bytes(encode(description))
    if classes_file.exists() and classes_file.read_bytes() != classes_json:
        raise TrainingError(
            f"{classes_file}: exists already, and describes another network; remove it, or name another file: -o FILE"
        )
    if options.format is FileFormat.ONNX:
        write_onnx(trained, file)
    elif options.format is FileFormat.TORCH:
        write_atomic_with(file, lambda stream: torch.save(weights, stream))
    else:
        # Under the names of others, this program could not read the file again.
        is_plain = options.names is ParameterNames.PLAIN
        metadata = description.metadata(trained.recipe) if is_plain else {"format": "pt"}
        try:
            write_safetensors(file, weights, metadata)
        except ValueError as error:
            raise TrainingError(f"{file}: {error}; export it with --format torch") from error
    write_atomic(classes_file, classes_json)
    emit_json_line(
        Exported(
            kind="exported",
            file=options.file,
            classes_file=str(classes_file),
            model=description.model,
            tensors=len(weights),
            parameters=sum(tensor.numel() for tensor in weights.values()),
            classes=len(description.classes),
            epoch=description.epoch,
            top1=description.top1,
            image_size=description.image_size,
        )
    )


def named_weights(trained: TrainedNetwork, names: ParameterNames) -> dict[str, torch.Tensor]:
    """Return the weights under the names of a library. Raises `TrainingError` when it has no such network."""
    model_name = trained.description.model
    if names is ParameterNames.PLAIN or model_name.startswith(f"{names}:"):  # a library's own network has its names
        return _contiguous(trained.weights)
    if model_name not in resnet.PUBLISHED_RESNETS:
        raise TrainingError(
            f"--names {names}: {names} has no {model_name}; leave the option out: the names are then those of the "
            "network's own modules"
        )
    if trained.recipe.model.blurpool:
        raise TrainingError(
            f"--names {names}: the {model_name} of {names} has no blur (blurpool=True), so these weights would give "
            "other scores there; leave the option out"
        )
    network = trained.build()
    assert isinstance(network, resnet.ResNet)
    return resnet.to_torchvision_keys(_contiguous(trained.weights), network.block_counts)


def _contiguous(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}


def write_onnx(trained: TrainedNetwork, file: Path) -> None:
    """Write the network as ONNX for batches of any size. Raises `TrainingError` when torch cannot convert it."""
    side = trained.description.image_size
    network = trained.build()
    temp = file.with_name(f".{file.name}.part")
    try:
        torch.onnx.export(
            network,
            (torch.zeros(2, 3, side, side),),
            str(temp),
            input_names=["images"],
            output_names=["scores"],
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            dynamo=True,
            external_data=False,
            verbose=False,
        )
        temp.replace(file)
    except OSError:
        raise
    except Exception as error:  # of many types, for an operation that ONNX does not have
        raise TrainingError(
            f"--format onnx: torch cannot convert {trained.description.model}: {first_line(error)}"
        ) from error
    finally:
        temp.unlink(missing_ok=True)
