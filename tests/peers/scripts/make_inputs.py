"""Make what example scripts would download, small and drawn at random, in the folder in which they run.

make_inputs.py nlp FOLDER     a BERT of two small layers, sentence pairs in the place of MRPC, and its metric
make_inputs.py chat FOLDER    a GPT-2 of two small layers, and texts for it
make_inputs.py text FOLDER    a text in the place of WikiText-2
make_inputs.py images FOLDER  an image folder of two classes, with train/ and val/

Hugging Face's libraries take a folder of the current folder before the hub, so a script finds these by its own names.
"""

import csv
import json
import random
import sys
from pathlib import Path

WORDS = ["machine", "train", "network", "image", "loss", "step", "model", "data", "batch", "rate", "layer", "weight"]
METRIC = '''
import datasets
import evaluate


class Accuracy(evaluate.Metric):
    """The share of right predictions, in the place of GLUE's metrics."""

    def _info(self):
        features = datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references):
        return {"accuracy": sum(map(int.__eq__, predictions, references)) / len(references)}
'''


def sentence(draw):
    return " ".join(draw.choices(WORDS, k=8))


def save_tokenizer(network, **special_tokens):
    from transformers import BertTokenizerFast

    network.mkdir()
    vocabulary = network / "vocab.txt"
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]) + "\n")
    files = {"vocab_file": str(vocabulary), "vocab": str(vocabulary)}
    BertTokenizerFast(**files, do_lower_case=False, **special_tokens).save_pretrained(network)


def make_nlp(folder, pairs=9600):
    import without_operators  # noqa: F401
    from transformers import BertConfig, BertForSequenceClassification

    draw = random.Random(0)
    network = folder / "bert-base-cased"
    save_tokenizer(network)
    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    BertForSequenceClassification(BertConfig(vocab_size=len(WORDS) + 5, **size)).save_pretrained(network)
    data = folder / "nyu-mll" / "glue"
    data.mkdir(parents=True)
    parts = {"train": pairs, "validation": 48}
    for part, count in parts.items():
        with (data / f"{part}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["idx", "sentence1", "sentence2", "label"])
            writer.writerows([index, sentence(draw), sentence(draw), draw.randrange(2)] for index in range(count))
    files = [{"split": part, "path": f"{part}.csv"} for part in parts]
    (data / "README.md").write_text(
        f"---\nconfigs: {json.dumps([{'config_name': 'mrpc', 'data_files': files}])}\n---\n"
    )
    metric = folder / "glue"
    metric.mkdir()
    (metric / "glue.py").write_text(METRIC)


def make_chat(folder, texts=480):
    import without_operators  # noqa: F401
    from transformers import GPT2Config, GPT2LMHeadModel

    draw = random.Random(0)
    network = folder / "gpt2"
    save_tokenizer(network, eos_token="[SEP]", pad_token="[PAD]")
    size = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
    config = GPT2Config(vocab_size=len(WORDS) + 5, bos_token_id=2, eos_token_id=3, **size)
    GPT2LMHeadModel(config).save_pretrained(network)
    (folder / "texts").mkdir()
    lines = [json.dumps({"text": sentence(draw)}) for _ in range(texts)]
    (folder / "texts" / "train.jsonl").write_text("\n".join(lines) + "\n")


def make_text(folder, blocks=4300):
    """Write `blocks` times 35 words: the script takes 4000 blocks for validation and test, the rest for training."""
    draw = random.Random(0)
    (folder / "data").mkdir()
    lines = (" ".join(draw.choices(WORDS, k=34)) for _ in range(blocks))
    (folder / "data" / "wikitext-2.txt").write_text("\n".join(lines) + "\n")


def make_images(folder, images=24):
    from PIL import Image

    draw = random.Random(0)
    for part in ("train", "val"):
        for name in ("dark", "light"):
            place = folder / part / name
            place.mkdir(parents=True)
            for index in range(images // 2):
                level = draw.randrange(128) + 127 * (name == "light")
                Image.new("RGB", (72, 64), (level, level, draw.randrange(256))).save(place / f"{index}.jpg")


if __name__ == "__main__":
    {"nlp": make_nlp, "chat": make_chat, "text": make_text, "images": make_images}[sys.argv[1]](Path(sys.argv[2]))
