"""Writes a trained network for other programs: its weights, its classes, and the line of Python that loads it."""

import importlib.util
from pathlib import Path

import torch

from train.models.resnet import PUBLISHED_RESNETS
from train.recipe.components import Model
from train.tools.errors import TrainingError, first_line
from train.tools.files import write_atomic, write_atomic_with
from train.tools.records import encode
from train.tools.text_files import to_json_bytes
from train.weights.safetensors_file import write_safetensors

from .protocol import ExportOptions, FileFormat, emit_json_line, reserve_stdout
from .trained_network import TrainedNetwork, open_trained

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
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in trained.weights.items()}
    classes_file = file.with_suffix(".classes.json")
    classes_json = to_json_bytes(encode(description))
    if classes_file.exists() and classes_file.read_bytes() != classes_json:
        raise TrainingError(
            f"{classes_file}: exists already, and describes another network, or this one after another step; remove it "
            "with its network, or name another file: -o FILE"
        )
    if options.format is FileFormat.ONNX:
        write_onnx(trained, file)
    elif options.format is FileFormat.TORCH:
        write_atomic_with(file, lambda stream: torch.save(weights, stream))
    else:
        try:
            write_safetensors(file, weights, description.metadata(trained.recipe))
        except ValueError as error:
            raise TrainingError(f"{file}: {error}; export it with --format torch") from error
    write_atomic(classes_file, classes_json)
    emit_json_line(
        {
            "kind": "exported",
            "file": options.file,
            "classes_file": str(classes_file),
            "model": description.model,
            "tensors": len(weights),
            "parameters": sum(tensor.numel() for tensor in weights.values()),
            "classes": len(description.classes),
            "epoch": description.epoch,
            "top1": description.top1,
            "image_size": description.image_size,
            "load_line": load_line(trained.recipe.model, file, len(description.classes), options.format),
        }
    )


def load_line(model: Model, file: Path, classes: int, file_format: FileFormat) -> str:
    """Return Python that loads an exported network, and what to install."""
    if file_format is FileFormat.ONNX:
        return f"import onnxruntime; net = onnxruntime.InferenceSession({str(file)!r})    (pip install onnxruntime)"
    library, _, name = model.name.rpartition(":")
    if not library and name in PUBLISHED_RESNETS and not model.blurpool:  # theirs has no blur, so other scores
        library = "torchvision"
    own_model = f"train.recipe.Model(name={name!r}, blurpool={model.blurpool})"
    builders = {
        "": f"train.models.registry.build_model({own_model}, {classes}, seed=0)",
        "torchvision": f"torchvision.models.get_model({name!r}, num_classes={classes})",
        "timm": f"timm.create_model({name!r}, num_classes={classes})",
    }
    reader, state, install = "torch", f"torch.load({str(file)!r}, weights_only=True)", "pip install"
    if file_format is FileFormat.SAFETENSORS:
        reader, state = "safetensors.torch", f"safetensors.torch.load_file({str(file)!r})"
        install += " safetensors"
    remark = f"    ({install} {library})" if library else ""
    if library not in builders:
        builders[library] = f"{library}.{name}({classes})"
        remark = f"    (where Python finds {library})"
    imports = f"import {reader}, {library or 'train.models.registry'}"
    return f"{imports}; net = {builders[library]}; net.load_state_dict({state}){remark}"


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
        name = trained.description.model
        raise TrainingError(f"--format onnx: torch cannot convert {name}: {first_line(error)}") from error
    finally:
        temp.unlink(missing_ok=True)
