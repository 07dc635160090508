"""The settings of a recipe in one line."""

from dataclasses import replace

from support.train_records import make_epoch

from train.metrics.text import EPOCH_COLUMNS, describe_training, epoch_header, epoch_line
from train.recipe import SAMPLE, Model, Phase, Recipe

PHASES = [Phase(epochs=(n, n + 1), size=32, batch=8, lr=0.1) for n in range(4)]
RECIPE = Recipe(name="t", data=SAMPLE, model=Model(name="resnet18", zero_gamma=False), phases=PHASES)


def test_describe_training_joins_adjacent_epochs() -> None:
    frozen = [replace(phase, frozen=phase.epochs[0] < 2, rect_train=phase.epochs[0] != 1) for phase in PHASES]
    description = describe_training(replace(RECIPE, model=Model(name="resnet18", weights="own.pt"), phases=frozen))
    assert description.endswith("weights own.pt, frozen in epochs 0-2, rectangles in epochs 0-1, 2-4")


def test_epoch_columns_have_different_names_and_never_touch() -> None:
    header = epoch_header()
    assert len(header) <= 79 and len({title for title, *_ in EPOCH_COLUMNS}) == len(EPOCH_COLUMNS)
    values = {
        "epoch": 128, "size": 1024, "global_batch": 65536, "lr": 0.0001234, "train_loss": 123.4567, "train_top1": 100.0,
        "val_loss": 12345.678, "top1": 100.0, "top5": 100.0, "seconds": 12345.67, "images_per_second": 401234.5,
    }  # fmt: skip
    line = epoch_line(make_epoch(**values))
    assert len(line) == len(header) and len(line.split()) == len(EPOCH_COLUMNS)
    assert line.split()[-2:] == ["12346", "401234"]
    assert epoch_line(make_epoch(seconds=3.456)).split()[-2] == "3.5"
