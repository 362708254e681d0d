"""Mistakes of newcomers: each error has at most three lines, the wrong value, and a fix that can be pasted.

The two tables are the list. A fix that is a command, or options of a command, is parsed.
"""

import json
import os
import shlex
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click import UsageError as WrongWords
from command_line import write_corpus
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from typed_commands import parse

import thrifty as th
from thrifty.cli.main import main
from thrifty.core.errors import TYPED, ThriftyError

USAGE, INFEASIBLE = 2, 3
DATA = "train text --data my.txt"
TYPED_MISTAKES = [
    # words, exit code, part of the first line, part of the fix
    ("trian text", USAGE, "'trian'", "did you mean 'train'?"),
    ("fit my.txt", USAGE, "'fit'", "thrifty --help"),
    ("train txt --data my.txt", USAGE, "no recipe 'txt'", "did you mean 'text'?"),
    ("train my.txt", USAGE, "'my.txt' is not TOML", "--data my.txt"),
    ("train lora --data my.txt", USAGE, "'lora' is a technique, not a recipe", "--with lora"),
    ("train bert-finetuning", USAGE, "no recipe 'bert-finetuning'", "thrifty list recipes"),
    ("train text", USAGE, "'text' has no data", "--data my.txt"),
    ("train text --data nope.txt", USAGE, "'nope.txt': no such file", "--data my.txt"),
    ("train text --data my.tx", USAGE, "'my.tx': no such file", "--data my.txt"),
    ("train text --data empty.txt", USAGE, "has no text", "--data my.txt"),
    ("train text --data tiny.txt", USAGE, "fewer than one batch of 32", "--data python-stdlib"),
    ("train text --data python-stdlb", USAGE, "'python-stdlb'", "did you mean 'python-stdlib'?"),
    ("train text --data photos", INFEASIBLE, "has images", "thrifty train vit-digits --data"),
    ("train vit-digits --data my.txt", INFEASIBLE, "has plain text", "thrifty train text --data"),
    ("train vit-digits --data corpus", INFEASIBLE, "has plain text", "thrifty train text --data"),
    ("train text --data chats.jsonl", INFEASIBLE, "has conversations", "--loss chat_answers"),
    ("train text --data reviews.csv", USAGE, "no column 'text'; there are: body, stars", "--set data.column=body"),
    ("train text --data reviews.csv --set data.column=bdy", USAGE, "no column 'bdy'", "--set data.column="),
    ("train text --data my.txt extra.txt", USAGE, "extra.txt", "thrifty train --help"),
    ("train text --data", USAGE, "'--data' requires an argument", "--data my.txt"),
    (f"{DATA} --budget '10 weeks'", USAGE, "'10 weeks' is not an amount", "10min"),
    (f"{DATA} --budget 1h30", USAGE, "'1h30' is not an amount", "2h"),
    (f"{DATA} --budget '5k steps'", USAGE, "'5k steps' is not an amount", "500steps"),
    (f"{DATA} --budget 100", USAGE, "'100' is not an amount", "--budget 100steps"),
    (f"{DATA} --budget -5steps", USAGE, "'-5steps' is not an amount", "500steps"),
    (f"{DATA} --budget 0steps", USAGE, "budget.steps is 0", "positive"),
    (f"{DATA} --steps 5 --epochs 3", USAGE, "both set the length", "keep only --steps 5"),
    (f"{DATA} --epochs three", USAGE, "--epochs 'three' is not a float", "--epochs 3"),
    (f"{DATA} --device gpu", USAGE, "unknown device 'gpu'", "--device cuda"),
    (f"{DATA} --batch 0", USAGE, "--batch '0' is not in the range x>=1", "--batch 32"),
    (f"{DATA} --lr 0", USAGE, "--lr '0.0' is not in the range x>0", "--lr 1e-3"),
    (f"{DATA} --lr 1e-3x", USAGE, "--lr '1e-3x' is not a float", "--lr 1e-3"),
    (f"{DATA} --learning_rate 1e-3", USAGE, "No such option '--learning_rate'", "--lr 1e-3"),
    (f"{DATA} --per_device_train_batch_size 8", USAGE, "'--per_device_train_batch_size'", "--batch 32"),
    (f"{DATA} --num-train-epochs 3", USAGE, "'--num-train-epochs'", "--epochs 3"),
    (f"{DATA} --max_steps 100", USAGE, "'--max_steps'", "--budget 500steps"),
    (f"{DATA} --output_dir out", USAGE, "'--output_dir'", "--name mine"),
    (f"{DATA} --fp16", USAGE, "'--fp16'", "--with mixed"),
    (f"{DATA} --gradient_checkpointing", USAGE, "'--gradient_checkpointing'", "--with recompute"),
    (f"{DATA} --set lr=1e-3", USAGE, "unknown key 'lr'", "--lr 1e-3"),
    (f"{DATA} --set data.batchsize=8", USAGE, "unknown key 'data.batchsize'", "did you mean 'batch'?"),
    (f"{DATA} --set data.batch", USAGE, "'data.batch' is not path=value", "--set data.batch=16"),
    (f"{DATA} --set data.batch=8.5", USAGE, "must be a whole number, not 8.5", "data.batch = 10"),
    (f"{DATA} --length 100000", USAGE, "0 examples of length 100000", "--set data.length="),
    (f"{DATA} --model llama-nanoo", USAGE, "no preset 'llama-nanoo'", "did you mean 'llama-nano'?"),
    (f"{DATA} --model gpt2", USAGE, "no preset 'gpt2'", "did you mean 'gpt-small'?"),
    (f"{DATA} --model meta-llama/Llama-2-7b", USAGE, "'meta-llama/Llama-2-7b'", "thrifty list presets"),
    (f"{DATA} --with loraa", USAGE, "no technique 'loraa'", "did you mean 'lora'?"),
    (f"{DATA} --with lora:r=8", USAGE, "'techniques.adapters.lora.r'", "rank"),
    (f"{DATA} --with lora:rank=0", USAGE, "rank is 0", "rank must be at least 1"),
    (f"{DATA} --without lion", USAGE, "--without optimizers.lion", "optimizers.adamw"),
    (f"{DATA} --mesh tensor=2", USAGE, "requires 2 ranks", "--ranks 2"),
    (f"{DATA} --ranks 5000", INFEASIBLE, "'5000', above the limit of", "--ranks "),
    (f"{DATA} --name 'my run/x'", USAGE, "'my run/x'", "use letters, digits and -"),
    ("train broken.toml", USAGE, "'broken.toml' is not TOML: Expected ']'", "correct this line"),
    ("train unknown.toml", USAGE, "unknown key 'num_train_epochs'", "--epochs 3"),
    ("train typed.toml", USAGE, "must be a whole number, not '32'", "data.batch = 10"),
    ("train missing.toml", USAGE, "no recipe file 'missing.toml'", "thrifty list recipes"),
    ("resume nope", USAGE, "no run 'nope'", "thrifty train text --data my.txt"),
    ("sample photos", USAGE, "'photos' is not a run folder", "runs/NAME"),
    ("chat nope --prompt hi", USAGE, "no run 'nope'", "thrifty train text --data my.txt"),
    ("export nope out", USAGE, "no run 'nope'", "thrifty train text --data my.txt"),
    ("export nope", USAGE, "Missing argument 'FOLDER'", "thrifty export --help"),
    ("report photos", USAGE, "'photos' is not a run folder", "runs/NAME"),
    ("track nope --to tensorboard", USAGE, "no run 'nope'", "thrifty train text --data my.txt"),
    ("plan text --data my.txt --memory lots", USAGE, "'lots' is not a size", "16GB"),
    ("plan text --data my.txt --memory 1", USAGE, "'1' is 1 B", "--memory 1GB"),
    ("train text --data my.txt --set compile=false", USAGE, "compile is a technique", "--without compile"),
    ("train text --data my.txt --set techniques.recompute=true", USAGE, "is a technique", "--with recompute"),
    ("plan text --data my.txt --allow all", USAGE, "--allow 'all' is not known", "exact, rounding"),
    ("estimate gpt-smal --memory 8GB", USAGE, "'gpt-smal'", "did you mean 'gpt-small'?"),
    ("compare text --data my.txt", USAGE, "no variant", '--variant "--with growth.stacking"'),
    ("compare text --data my.txt --variant '--with adamw'", USAGE, "same run as 'baseline'", "change a setting"),
    ("compare text --data my.txt --variant lion", USAGE, "'lion' is a technique", "--with lion"),
    ("sweep text --data my.txt", USAGE, "no setting to vary", "--over optimizers.adamw.lr=1e-4..1e-2:log"),
    ("sweep text --data my.txt --over lr=1e-4..1e-2", USAGE, "no setting 'lr'", "--over adamw.lr=1e-4..1e-2:log"),
    ("sweep text --data my.txt --over model.preset=a..b", USAGE, "'a..b' is not a range", "--over model.preset=a,b"),
    ("show text", USAGE, "'text' is a recipe", "thrifty explain text --data my.txt"),
    ("show vit-digits", USAGE, "'vit-digits' is a recipe", "thrifty explain vit-digits"),
    ("explain lion_rate", USAGE, "'lion_rate' is a study", "thrifty study lion_rate"),
    ("train --model openai-community/gpt2 --data my.txt", USAGE, "no preset", "hf download openai-community/gpt2"),
    ("data look ''", USAGE, "the source is empty", "such as my.txt"),
    ("show lorra", USAGE, "no technique 'lorra'", "did you mean 'lora'?"),
    ("list technique", USAGE, "'technique' is not known", "did you mean 'techniques'?"),
    ("study lion", USAGE, "no study 'lion'", "did you mean 'lion_rate'?"),
    ("data look nope.txt", USAGE, "'nope.txt': no such file", "--data my.txt"),
]


def build_model(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 3))


def build_sized(width: int) -> nn.Module:
    return build_model(width)


def build_frozen() -> nn.Module:
    return build_model().requires_grad_(False)


def build_sparse() -> nn.Module:
    return nn.Sequential(nn.Embedding(9, 8, sparse=True), build_model())


def build_on_meta() -> nn.Module:
    with torch.device("meta"):
        return build_model()


def loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def loss_of_keys(model: nn.Module, batch: Any) -> Tensor:
    return loss(model, (batch["inputs"], batch["labels"]))


def loss_without_gradient(model: nn.Module, batch: Any) -> Tensor:
    return loss(model, batch).detach()


def loss_as_dict(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    return {"loss": loss(model, batch)}


INPUTS, LABELS = torch.linspace(-1, 1, 64 * 8).view(64, 8), torch.arange(64) % 3
EXAMPLES, WORDS = TensorDataset(INPUTS, LABELS), TensorDataset(torch.arange(64) % 9, LABELS)


def train(**changed: Any) -> Any:
    own = {"model": build_model, "data": EXAMPLES, "held_out": EXAMPLES, "loss": loss, "budget": 2, "batch": 8}
    return th.train(**{**own, "quiet": True, **changed})


PYTHON_MISTAKES: list[tuple[Callable[[], Any], str, str]] = [
    # call, part of the first line, part of the fix
    (lambda: train(model=build_model().state_dict()), "'OrderedDict', not a torch.nn.Module", "model=build_model"),
    (lambda: train(model=build_sized), "missing a required argument: 'width'", "model_arguments={'width': …}"),
    (lambda: train(model=build_frozen), "the loss has no gradient", "requires_grad_(True)"),
    (lambda: train(model=build_on_meta), "meta device", "load_state_dict(weights, assign=True)"),
    (lambda: train(model="gpt2", data="my.txt", held_out=None, loss=None), "'gpt2'", "did you mean 'gpt-small'?"),
    (lambda: th.compare("text", length=128), "compare has no argument 'length'", 'settings={"data.length": 256}'),
    (lambda: th.check("text", lr=0.1), "check has no argument 'lr'", "thrifty.AdamW(lr=1e-3)"),
    (lambda: th.explain("text", bacth=3), "explain has no argument 'bacth'", "did you mean 'batch'?"),
    (lambda: th.recipe("kjv"), "'kjv' is a recipe, not a model", 'recipe="kjv"'),
    (lambda: train(loss=loss_without_gradient), "the loss has no gradient", "without .item(), .detach()"),
    (lambda: train(loss=loss_as_dict), "is a dict", "return a tensor (8,)"),
    (lambda: train(loss=loss_of_keys), "a batch is a list of 2 parts", "def loss(model, batch)"),
    (lambda: train(loss=nn.CrossEntropyLoss()), "a batch is a list of 2 parts", "def loss(model, batch)"),
    (lambda: train(techniques=[torch.optim.AdamW]), "'AdamW'", "techniques=[thrifty.AdamW(lr=1e-3)]"),
    (lambda: train(model=build_sparse, data=WORDS, held_out=WORDS), "'0.weight' is sparse", "sparse=False"),
    (lambda: train(loss="cross_entropy"), "no objective 'cross_entropy'", "next_token"),
    (lambda: train(loss=None), "no loss was passed", "pass loss="),
    (lambda: train(data=3), "is a int, not a dataset", "map-style"),
    (lambda: train(data=(row for row in EXAMPLES)), "a generator, which can be read once only", "list"),
    (lambda: train(data=[]), "no examples", "pass a dataset"),
    (lambda: train(data=TensorDataset(INPUTS, LABELS + 5)), "3 classes", "use labels from 0 to 2"),
    (lambda: train(held_out=None), "held-out data", "torch.utils.data.random_split(data, [0.9, 0.1])"),
    (lambda: train(batch=0), "batch is 0", "at least 1"),
    (lambda: train(batch=1000), "fewer than one batch of 1000", "batch=64"),
    (lambda: train(budget="5k steps"), "'5k steps'", "500steps"),
    (lambda: train(budget=1.5), "'1.5' is not an amount", "500steps"),
    (lambda: train(budget=-5), "budget.steps is -5", "positive"),
    (lambda: train(techniques=["loraa"]), "no technique 'loraa'", "did you mean 'lora'?"),
    (lambda: train(techniques="lora"), "'lora', not a list", 'techniques=["lora"]'),
    (lambda: train(techniques=[torch.optim.SGD(build_model().parameters())]), "'SGD'", "thrifty.AdamW(lr=1e-3)"),
    (lambda: train(techniques=["adamw", "lion"]), "both decide the optimizer", "techniques without"),
    (lambda: train(settings={"learning_rate": 1e-3}), "'learning_rate'", "techniques=[thrifty.AdamW(lr=1e-3)]"),
    (lambda: train(device="gpu"), "unknown device 'gpu'", 'device="cuda"'),
    (lambda: train(ranks=5000), "'5000', above the limit of", "ranks="),
    (lambda: train(name="my run/x"), "'my run/x'", "use letters"),
    (lambda: th.train(data="nope.txt"), "'nope.txt'", 'data="my.txt"'),
    (lambda: th.train(model="llama-nano"), "has no data", 'data="my.txt"'),
    (lambda: th.apply(build_model(), "loraa"), "no technique 'loraa'", "did you mean 'lora'?"),
    (lambda: th.apply(build_model(), "lora", rank=0), "rank is 0", "at least 1"),
    (lambda: th.apply(build_model(), "layer_drop"), "only thrifty.train controls", "thrifty.train("),
    (lambda: th.apply(build_model(), "optimizer_state"), "changes the optimizer", "thrifty.apply(optimizer,"),
    (lambda: th.optim.Muon(build_model().parameters()), "have no names", "model.named_parameters()"),
    (lambda: th.optim.AdamW(build_model(), lr=-1), "lr is -1", "at least 0"),
    (lambda: th.resume("runs/nope"), "no run 'runs/nope'", 'thrifty.train(data="my.txt")'),
    (lambda: th.list("technique"), "'technique'", "did you mean 'techniques'?"),  # type: ignore[arg-type]
    (lambda: th.plan("text", memory="lots"), "memory 'lots'", "16GB"),
    (lambda: th.sweep("text", {}), "no setting to vary", 'over={"optimizers.adamw.lr": "1e-4..1e-2:log"}'),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of a newcomer."""
    folder = tmp_path_factory.mktemp("newcomer")
    write_corpus(folder / "corpus")
    (folder / "my.txt").write_text((folder / "corpus" / "heapq.py").read_text())
    (folder / "empty.txt").touch()
    (folder / "tiny.txt").write_text("Hello world.\n")
    (folder / "photos").mkdir()
    for shade in range(8):
        Image.new("L", (8, 8), shade * 30).save(folder / "photos" / f"{shade}.png")
    talk = {"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}]}
    (folder / "chats.jsonl").write_text(f"{json.dumps(talk)}\n" * 40)
    (folder / "reviews.csv").write_text("body,stars\n" + "good,1\nbad,0\n" * 40)
    (folder / "broken.toml").write_text('name = "x"\n[data\nbatch = 3\n')
    (folder / "unknown.toml").write_text('name = "x"\nnum_train_epochs = 3\n')
    (folder / "typed.toml").write_text('[data]\nsource = "my.txt"\nbatch = "32"\n')
    return folder


@pytest.fixture(autouse=True)
def user(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Work in the folder, and restore what the command line changes in this process."""
    monkeypatch.chdir(folder)
    before, handlers = dict(os.environ), {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    yield
    os.environ.clear()
    os.environ.update(before)
    for number, handler in handlers.items():
        signal.signal(number, handler)


def assert_helps(message: str, what: str, fix: str) -> None:
    first, *rest = message.rstrip("\n").split("\n")
    assert what in first and len(rest) <= 2, message
    assert rest and rest[0].startswith("  fix: ") and fix in "\n".join(rest), message
    assert "Traceback" not in message and len(message) < 700, message


@pytest.mark.parametrize(("words", "code", "what", "fix"), TYPED_MISTAKES, ids=[row[0] for row in TYPED_MISTAKES])
def test_typed_mistake(words: str, code: int, what: str, fix: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(shlex.split(words))
    printed = capsys.readouterr()
    assert ended.value.code == code, printed.err
    assert not printed.out
    assert_helps(printed.err[printed.err.index("thrifty: ") :], what, fix)
    if fix.startswith("thrifty ") and not fix.endswith(("--help", "--data")):
        parse(shlex.split(fix)[1:])
    elif fix.startswith("--") and not fix.endswith((" ", "=")):
        verb = words.split()[0] if words.startswith(("compare", "sweep", "plan")) else "train"
        parse([verb, "text", *shlex.split(fix)])


@pytest.mark.parametrize(("call", "what", "fix"), PYTHON_MISTAKES, ids=[row[1] for row in PYTHON_MISTAKES])
def test_python_mistake(call: Callable[[], Any], what: str, fix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TYPED, raising=False)
    with pytest.raises(ThriftyError) as refused:
        call()
    assert_helps(str(refused.value), what, fix)
    assert "--" not in str(refused.value)


def test_both_lists_have_at_least_fifty_mistakes() -> None:
    assert len(TYPED_MISTAKES) >= 50 and len(TYPED_MISTAKES) + len(PYTHON_MISTAKES) >= 100


def test_parsed_fixes_can_be_refused() -> None:
    with pytest.raises(WrongWords):
        parse(["train", "text", "--learning-rate", "1"])
