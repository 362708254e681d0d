"""Datasets of the user's own: of any form, read alike however often, in whatever processes and after any stop."""

import pickle
from collections import UserDict, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import user_work
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import thrifty
from thrifty.core.errors import RefusedError, ThriftyError, UsageError
from thrifty.data.batch_forms import deep_copy
from thrifty.data.data_loading import dataset_of
from thrifty.data.prefetch import prefetch
from thrifty.data.user_data import UserData, open_user_data
from thrifty.training import checkpoint

X = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 0).long()
Pair = namedtuple("Pair", "x y")


@dataclass(frozen=True)
class Labelled:
    x: Tensor
    y: Tensor
    is_train: bool = True


def opened(data: Any, held_out: Any = None, **more: Any) -> UserData:
    return open_user_data(data, data if held_out is None else held_out, 8, 0, **more)


ROWS = [{"x": x, "y": y} for x, y in zip(X, Y, strict=True)]
FORMS: dict[str, Callable[[], Any]] = {
    "TensorDataset": lambda: TensorDataset(X, Y),
    "Subset": lambda: Subset(TensorDataset(X, Y), range(4, 30)),
    "ConcatDataset": lambda: ConcatDataset([TensorDataset(X, Y), TensorDataset(X, Y)]),
    "list of dictionaries": lambda: ROWS,
    "numpy array": X.numpy,
    "tensor": lambda: X,
    "tuple of arrays": lambda: (X.numpy(), Y.numpy()),
    "dictionary of arrays": lambda: {"x": X.numpy(), "y": Y},
}


@pytest.mark.parametrize("name", FORMS)
def test_every_kind_of_dataset_yields_torchs_collated_batches(name: str) -> None:
    data = opened(FORMS[name]())
    batch = data.train.at(3)
    whole = data.assembled(batch)
    x = whole["x"] if isinstance(whole, dict) else whole if isinstance(whole, Tensor) else whole[0]
    assert x.shape == (8, 6) and all(any(torch.equal(row, each) for each in X) for row in x)


class Encoding(UserDict):
    """As `BatchEncoding` of transformers is."""


@pytest.mark.parametrize(
    ("collate", "x"),
    [
        (lambda rows: Pair(*torch.utils.data.default_collate([tuple(row.values()) for row in rows])), lambda b: b.x),
        (
            lambda rows: Labelled(torch.stack([r["x"] for r in rows]), torch.stack([r["y"] for r in rows])),
            lambda b: b.x,
        ),
        (lambda rows: Encoding(x=torch.stack([r["x"] for r in rows]), extra=None), lambda b: b["x"]),
        (lambda rows: [{"x": (torch.stack([r["x"] for r in rows]),)}], lambda b: b[0]["x"][0]),
        (lambda rows: {"x": np.stack([r["x"] for r in rows])}, lambda b: b["x"]),
    ],
    ids=["named tuple", "dataclass", "mapping", "nested", "numpy"],
)
def test_a_batch_keeps_the_form_of_its_collate_function(collate: Any, x: Any) -> None:
    data = opened(ROWS, collate=collate)
    given, wanted = data.assembled(data.train.rows(0, 2, 5)), collate(ROWS[:3])
    assert type(given) is type(wanted) and x(given).shape == (3, 6)
    if isinstance(given, Labelled):
        assert given.is_train


def test_rows_of_datasets_come_as_tensors() -> None:
    datasets = pytest.importorskip("datasets")
    plain = datasets.Dataset.from_dict({"x": X.tolist(), "y": Y.tolist()})
    data = opened(plain)
    assert data.assembled(data.train.at(0))["x"].shape == (8, 6)
    doubled = plain.with_transform(lambda rows: {"x": [2 * torch.tensor(row) for row in rows["x"]]})
    assert data.identity["data"] != opened(doubled).identity["data"]
    with pytest.raises(ThriftyError, match="DatasetDict with the keys train"):
        opened(datasets.DatasetDict(train=plain))


class Restless(Dataset[Tensor]):
    """Draws from a generator of its own, which nobody seeds."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": X[index] + float(self.generator.random()), "y": Y[index]}


def test_an_unstable_dataset_is_named_and_its_resume_inexact(tmp_path: Path) -> None:
    options = {**user_work.objects(), "data": Restless(), "held_out": ROWS, "batch": 8, "runs": tmp_path}
    run = thrifty.train(**options, budget=3, quiet=True)
    words = run.summary["unrepeatable"]
    assert "data (Restless) differs in 'x' when it is read twice" in words and "not bit-identical" in words
    assert words in repr(run) and words in (run.folder / "records.jsonl").read_text()
    assert not opened([{"x": torch.tensor([float("nan")])}] * 9).train.unrepeatable


def test_a_later_example_that_differs_from_itself_is_found() -> None:
    class LateRestless(Restless):
        def __getitem__(self, index: int) -> dict[str, Tensor]:
            return super().__getitem__(index) if index > 30 else {"x": X[index], "y": Y[index]}

    assert "data (LateRestless) differs in 'x' when it is read twice" in opened(LateRestless(), ROWS).train.unrepeatable


def test_collating_that_draws_depends_on_no_ranks() -> None:
    def noisy(rows: list[Any]) -> Tensor:
        return torch.stack([row["x"] for row in rows]) + torch.randn(len(rows), 1)

    data = opened(ROWS, collate=noisy)
    parts = [data.train.rows(2, start, start + 2) for start in range(0, 8, 2)]
    assert torch.equal(torch.cat([part["batch"] for part in parts]), data.train.at(2)["batch"])


@pytest.mark.parametrize("workers", [1, 2])
def test_loader_workers_read_equal_batches(workers: int) -> None:
    dataset = user_work.NoisySums(50)
    loader = DataLoader(dataset, batch_size=8, shuffle=True, num_workers=workers)
    alone, read = opened(dataset).train, opened(loader, dataset).train
    assert not alone.loading and read.loading["num_workers"] == workers
    for one, other in zip(prefetch(alone, 2, 6), prefetch(read, 2, 6), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one.fields)


class Doubled(Dataset[Any]):
    def __init__(self, inner: Dataset[Any]):
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Tensor:
        return 2 * self.inner[index]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [user_work.RowsOfFile, user_work.RowsOfFiles])
@pytest.mark.parametrize(
    "wrapped",
    [lambda rows: rows, lambda rows: Subset(rows, range(1500)), lambda rows: ConcatDataset([rows, rows]), Doubled],
    ids=["plain", "subset", "concatenated", "wrapped"],
)
def test_a_file_that_a_dataset_opens_is_read_by_one_process(
    kind: type[user_work.RowsOfFile], wrapped: Callable[[Any], Any], workers: int, tmp_path: Path
) -> None:
    """Processes that share an opened file would share its position, and return other rows."""
    np.repeat(np.arange(2000), 64).tofile(tmp_path / "rows")
    rows = kind(str(tmp_path / "rows"))
    dataset, times = wrapped(rows), 2 if wrapped is Doubled else 1
    source = opened(DataLoader(dataset, 32, shuffle=True, num_workers=workers), Subset(dataset, range(9))).train
    for batch in prefetch(source, 0, 50):
        assert torch.equal(batch["batch"], batch["batch"][:, :1].expand(-1, 64)) and (batch["batch"] % times == 0).all()
    assert rows.file is None and not getattr(rows, "files", None) and pickle.dumps(dataset)


def test_other_attributes_of_a_read_dataset_are_the_users(tmp_path: Path) -> None:
    np.repeat(np.arange(100), 64).tofile(tmp_path / "rows")
    rows = user_work.RowsOfFiles(str(tmp_path / "rows"))
    for step in range(2):  # each call reads the same object
        source = opened(rows).train
        before = rows.reads
        source.at(0)
        assert rows.reads == before + 8 > 8
        np.repeat(np.arange(1000, 1100), 64).tofile(tmp_path / f"rows {step}")
        rows.path = str(tmp_path / f"rows {step}")
        assert (source.at(0)["batch"] >= 1000).all()


@pytest.mark.parametrize("context", [None, "fork", "spawn", "forkserver"])
def test_start_functions_of_forked_workers_find_the_dataset(context: str | None, tmp_path: Path) -> None:
    for name, first in {"rows": 0, "rows of workers": 1000}.items():
        np.repeat(np.arange(first, first + 100), 64).tofile(tmp_path / name)
    options = {"worker_init_fn": user_work.read_other_rows, "multiprocessing_context": context}
    loader = DataLoader(user_work.RowsOfFile(str(tmp_path / "rows")), 8, num_workers=1, **options)
    source = opened(loader).train
    assert all((batch["batch"] >= 1000).all() for batch in prefetch(source, 0, 3))
    assert any("its workers are forked" in notice for notice in source.notices) == (context in ("spawn", "forkserver"))


def test_an_error_in_a_worker_keeps_its_fix() -> None:
    class Broken(user_work.NoisySums):
        def __getitem__(self, index: int) -> Any:
            return {}["missing"] if index == 7 else super().__getitem__(index)

    data = DataLoader(Broken(50), 8, shuffle=True, num_workers=1)
    with pytest.raises(ThriftyError, match=r"example 7 .* cannot be read: KeyError") as error:
        list(prefetch(opened(data, user_work.NoisySums(9)).train, 0, 7))
    assert error.value.fix


WHOLE = TensorDataset(X, Y)
SHARED: dict[str, tuple[Any, Any, str]] = {
    "the same dataset": (WHOLE, DataLoader(WHOLE, 8), "40 of 40"),
    "a subset": (WHOLE, Subset(WHOLE, range(30, 40)), "10 of 10"),
    "overlapping subsets": (Subset(WHOLE, range(32)), Subset(WHOLE, [1, 33, 39]), "1 of 3"),
    "disjoint subsets": (Subset(WHOLE, range(32)), Subset(WHOLE, range(32, 40)), ""),
    "a subset of a subset": (Subset(WHOLE, range(20)), Subset(Subset(WHOLE, range(10, 30)), [0, 15]), "1 of 2"),
    "a concatenation": (ConcatDataset([WHOLE, TensorDataset(X, Y)]), Subset(WHOLE, range(9)), "9 of 9"),
    "a slice of a list": (ROWS, ROWS[:12], "12 of 12"),
    "the rest of a list": (ROWS[12:], ROWS[:12], ""),
    "other objects": (ROWS, [dict(row) for row in ROWS], ""),
    "indices from the end": (WHOLE, Subset(WHOLE, [-1, -2]), "2 of 2"),
    "keys": (ROWS, Subset({"a": ROWS[0], "b": ROWS[1]}, ["a", "b"]), ""),
    "columns": ((X, Y), (X[:20], Y[:20]), ""),
}


@pytest.mark.parametrize("name", SHARED)
def test_held_out_examples_in_the_training_data_are_named(name: str) -> None:
    data, held_out, words = SHARED[name]
    notices = [each for each in opened(data, held_out).train.notices if "training examples too" in each]
    assert [each.partition(" held-out")[0] for each in notices] == ([words] if words else [])


def test_settings_of_a_data_loader_are_kept_or_named() -> None:
    in_order = opened(DataLoader(ROWS, 16), ROWS)
    assert torch.equal(in_order.train.at(1)["x"], X[8:16])
    assert "shuffle=False" in in_order.train.notices[0]
    generator = torch.Generator()
    named = opened(DataLoader(ROWS, 16, shuffle=True, drop_last=True, generator=generator), ROWS).train.notices
    assert "generator is not used" in named[0] and "drop_last" in named[1]


class Numbers(IterableDataset[dict[str, Tensor]]):
    """Numbers with noise of the global generators."""

    def __init__(self, count: int = 20):
        self.count = count

    at = 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        first, self.at = self.at, 0
        for number in range(first, self.count):
            self.at = number + 1
            ResumableNumbers.reads += 1
            yield {"x": torch.full((6,), float(number)) + torch.randn(6), "y": torch.tensor(number % 2)}


class ResumableNumbers(Numbers):
    """The same with a state."""

    reads = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class ForgetfulNumbers(ResumableNumbers):
    """Has a state that restores nothing."""

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


@pytest.mark.parametrize("kind", [Numbers, ResumableNumbers, ForgetfulNumbers])
def test_an_iterable_dataset_is_read_in_order_and_repeated(kind: type[Numbers]) -> None:
    train = opened(kind(), judged=5).train
    batches = [train.at(step) for step in range(6)]
    numbers = torch.cat([batch["y"] for batch in batches])
    assert numbers.tolist() == [number % 20 % 2 for number in range(48)]
    assert torch.equal(train.at(1)["x"], batches[1]["x"])  # asked again, out of order
    assert torch.equal(train.rows(4, 2, 6)["x"], batches[4]["x"][2:6])
    assert train.keeps_state == (kind is ResumableNumbers)
    assert ("keep the state" if kind is ResumableNumbers else "reads all earlier examples again") in train.notices[0]


def test_a_state_saves_reading_what_was_read() -> None:
    before, after = opened(ResumableNumbers(100)).train, opened(ResumableNumbers(100)).train
    wanted = [before.at(step) for step in range(6)][-1]
    before.at(4)
    state = before.state()
    after.load_state(state)
    ResumableNumbers.reads = 0
    assert torch.equal(after.at(5)["y"], wanted["y"]) and ResumableNumbers.reads == 8


@pytest.mark.parametrize("kind", [Numbers, ResumableNumbers])
def test_runs_on_iterable_datasets_resume_bit_for_bit(kind: Any, tmp_path: Path) -> None:
    options = {**user_work.objects(), "data": kind(50), "held_out": ROWS, "batch": 8, "runs": tmp_path, "quiet": True}
    whole = thrifty.train(**options, budget=12, name="whole")
    part = thrifty.train(**options, budget=12, name="part", observers=[lambda record: record.step < 5])
    assert part.summary["status"] == "interrupted"
    again = thrifty.resume(part)
    one, other = (checkpoint.load(run.folder / "checkpoints").tensors for run in (whole, again))
    assert all(torch.equal(one[name], other[name]) for name in one) and again.loss == whole.loss


class Exhausted(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        return ROWS[0]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ((row for row in ROWS), "can be read once only"),
        (Exhausted(), "can be read once only"),
        ({}, "not a dataset"),
        (3, "is a int"),
        ("rows", "is a str"),
        ((X.numpy(), Y.numpy()[:3]), "3 and 40 rows"),
        ([], "no examples"),
        (Numbers(0), "no examples"),
        (ChainDataset([Numbers(0)]), "no examples"),
        ([{"text": "a"}] * 9, r"part 'text\.0' of a batch is a str \('a'\)"),
        ([{"x": torch.ones(number)} for number in range(1, 10)], "cannot be collated"),
        ([{"x": X[0]}, {"x": X[0]}, {"z": X[0]}] * 9, "cannot be collated|differ in form"),
        (DataLoader(ROWS, batch_size=None), "its dataset returns whole batches"),
        (DataLoader(ROWS, batch_sampler=[[0, 1]]), "sampler of its own"),
    ],
)
def test_other_objects_than_datasets_are_refused_with_the_fix(data: Any, words: str) -> None:
    with pytest.raises(ThriftyError, match=words) as error:
        opened(data, None if isinstance(data, list) else ROWS).train.at(0)
    assert error.value.fix


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return user_work.build()


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (on_meta, "torch's meta device: '.*' has no values"),
        (lambda: nn.LazyLinear(2), "lazy layers without weights, such as 'weight'"),
        (Complex, "'weight' is complex"),
        (lambda: torch.jit.trace(nn.Linear(6, 2), X[:2]), "a module of TorchScript"),
    ],
)
def test_untrainable_models_are_refused_with_a_fix(build: Any, words: str, tmp_path: Path) -> None:
    objects = {**user_work.objects(), "model": build, "loss": lambda model, batch: next(model.parameters()).abs().sum()}
    with pytest.raises(UsageError, match=words) as error:
        thrifty.train(**objects, batch=8, budget=2, runs=tmp_path, quiet=True)
    assert error.value.fix
    if build is not on_meta:
        with pytest.raises(UsageError, match=words):
            thrifty.estimate(build(), X[:8], loss=lambda model, batch: next(model.parameters()).abs().sum())


def test_transformers_models_learn_from_tokenizer_batches(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )

    def collate(rows: list[Tensor]) -> Any:
        tokens = user_work.padded(rows)
        encoded = {"input_ids": tokens, "attention_mask": (tokens != 0).long(), "labels": tokens[:, 0] % 2}
        return transformers.BatchEncoding(encoded)

    run = thrifty.train(
        model=lambda: transformers.BertForSequenceClassification(config),
        data=user_work.Sentences(),
        held_out=user_work.Sentences(),
        collate=collate,
        batch=16,
        budget=2,
        runs=tmp_path,
        quiet=True,
    )
    assert run.loss is not None and isinstance(run.model, nn.Module)


@pytest.mark.parametrize("is_shuffled", [False, True])
def test_hub_streams_resume_by_state_unless_a_buffer_shuffles(is_shuffled: bool) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"x": X.tolist(), "y": Y.tolist()}).with_format("torch").to_iterable_dataset(2)
    rows = rows.shuffle(seed=1, buffer_size=10) if is_shuffled else rows
    whole, stopped, resumed = (opened(rows, ROWS).train for _ in range(3))
    assert whole.keeps_state != is_shuffled
    batches = [whole.at(step) for step in range(10)]
    for step in range(7):
        stopped.at(step)
    resumed.load_state(stopped.state())
    for step in range(7, 10):
        assert torch.equal(resumed.at(step)["x"], batches[step]["x"])


def next_token_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits, targets = model.logits(batch["tokens"][:, :-1]), batch["tokens"][:, 1:]  # type: ignore[operator]
    return nn.functional.cross_entropy(logits.mT.float(), targets, reduction="none").mean(1)


def image_loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model.logits(batch[0]).float(), batch[1], reduction="none")  # type: ignore[operator]


@pytest.mark.parametrize(
    ("preset", "data", "loss"),
    [
        ("gpt-nano", [{"tokens": row} for row in torch.randint(0, 300, (24, 16))], next_token_loss),
        ("vit-nano", TensorDataset(torch.rand(24, 3, 32, 32), torch.randint(0, 10, (24,))), image_loss),
    ],
)
def test_presets_learn_from_own_datasets(preset: str, data: Any, loss: Any, tmp_path: Path) -> None:
    objects = {"data": data, "held_out": data, "loss": loss}
    settings = {"model.depth": 1, "model.width": 32, "model.heads": 2}
    run = thrifty.train(
        preset, **objects, settings=settings, budget=2, batch=8, name="own", runs=tmp_path / "runs", quiet=True
    )
    assert run.loss > 0 and sum(each.numel() for each in run.model.parameters())
    thrifty.export(run, tmp_path / "exported")
    assert (tmp_path / "exported" / "model.safetensors").is_file()


class WithLoss(nn.Module):
    def __init__(self, form: str):
        super().__init__()
        self.form, self.layer = form, nn.Linear(6, 2)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        logits = self.layer(x)
        loss = nn.functional.cross_entropy(logits, y)
        forms = {
            "tuple": (loss, logits),
            "dict": {"loss": loss, "logits": logits},
            "named tuple": Scored(torch.tensor(0.0), loss),
            "dict with an attribute": AttributeDict({"mean": loss}),
        }
        return forms[self.form]


Scored = namedtuple("Scored", "accuracy loss")


class AttributeDict(dict[str, Tensor]):
    @property
    def loss(self) -> Tensor:
        return self["mean"]


@pytest.mark.parametrize("form", ["tuple", "dict", "named tuple", "dict with an attribute"])
def test_the_loss_of_a_models_output_is_used(form: str, tmp_path: Path) -> None:
    options = {"held_out": ROWS, "budget": 2, "batch": 8, "runs": tmp_path, "quiet": True}
    assert thrifty.train(WithLoss(form), ROWS, **options).loss > 0


def test_a_preset_on_own_data_requires_a_loss(tmp_path: Path) -> None:
    data = [{"tokens": row} for row in torch.randint(0, 300, (24, 16))]
    with pytest.raises(UsageError, match="no loss was passed") as error:
        thrifty.train("gpt-nano", data, held_out=data, budget=2, batch=8, runs=tmp_path / "runs", quiet=True)
    assert "pass loss=" in error.value.fix


@pytest.mark.parametrize(("sampler", "is_shuffled"), [(RandomSampler(ROWS), True), (SequentialSampler(ROWS), False)])
def test_a_loader_with_torchs_batch_sampler_is_taken_apart(sampler: Any, is_shuffled: bool) -> None:
    parts = dataset_of(DataLoader(ROWS, batch_sampler=BatchSampler(sampler, 4, True)))
    assert parts.batch == 4 and parts.is_shuffled is is_shuffled


@pytest.mark.parametrize("sampler", [SubsetRandomSampler([1, 2, 3]), WeightedRandomSampler([1.0] * 40, 40)])
def test_samplers_inside_a_batch_sampler_are_refused(sampler: Any) -> None:
    with pytest.raises(RefusedError, match="a sampler of its own") as error:
        dataset_of(DataLoader(ROWS, batch_sampler=BatchSampler(sampler, 4, False)))
    assert ("loader.batch_sampler.sampler.indices" in error.value.fix) is isinstance(sampler, SubsetRandomSampler)


def zeros(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: 0 * each for name, each in torch.utils.data.default_collate(rows).items()}


def test_held_out_loaders_keep_their_own_collate_function() -> None:
    plain, zeroed = DataLoader(ROWS, 8), DataLoader(ROWS, 8, collate_fn=zeros)

    def held_out_sum(data: Any, held_out: Any, **more: Any) -> float:
        (batch,) = opened(data, held_out, **more).held_out.batches(8, 8)
        return float(batch["x"].abs().sum())

    assert held_out_sum(zeroed, plain) > 0 and held_out_sum(plain, zeroed) == 0
    assert held_out_sum(zeroed, ROWS) == 0 and held_out_sum(zeroed, plain, collate=zeros) == 0


class Counted(IterableDataset[dict[str, Tensor]]):
    """A stream without end that counts what is read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        number = 0
        while True:
            self.read.append(number)
            yield ROWS[number % len(ROWS)]
            number += 1

    def __deepcopy__(self, memo: Any) -> "Counted":
        return self  # so that all reads are counted


def test_long_runs_on_streams_start_without_reading_them(tmp_path: Path) -> None:
    stream, steps = Counted(), []

    def observe(record: Any) -> bool:
        steps.append(record.step)
        return False

    objects = user_work.objects() | {"data": stream, "held_out": ROWS}
    thrifty.train(**objects, batch=8, budget=5000, observers=[observe], runs=tmp_path, quiet=True)
    assert steps == [1] and max(stream.read) < 100


def test_streams_on_large_files_are_not_copied(tmp_path: Path) -> None:
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "tokens.bin")

    class Windows(IterableDataset[Tensor]):
        def __init__(self) -> None:
            self.tokens, self.places = np.memmap(tmp_path / "tokens.bin", np.uint16), [0, 1]

        def __iter__(self) -> Iterator[Tensor]:
            return iter(torch.from_numpy(self.tokens.astype(np.int64)).reshape(20, 5))

    dataset = Windows()
    copied = deep_copy(dataset)
    assert copied.tokens is dataset.tokens and copied.places is not dataset.places
    assert torch.equal(opened(dataset, dataset).train.at(0)["batch"][0], torch.arange(5))


def test_streams_of_held_out_examples_are_judged_in_part(tmp_path: Path) -> None:
    class Rows(IterableDataset[dict[str, Tensor]]):
        def __iter__(self) -> Iterator[dict[str, Tensor]]:
            return iter(ROWS)

    data = opened(ROWS, Rows(), judged=16)
    assert len(data.held_out) == 16 and "only its first 16 examples are judged" in " ".join(data.train.notices)
    whole = opened(ROWS, Rows(), judged=40)
    assert len(whole.held_out) == 40 and "first 40" not in " ".join(whole.train.notices)
    assert data.identity == whole.identity
