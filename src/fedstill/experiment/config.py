"""An experiment as frozen pydantic models with the same names as the TOML file; all mistakes come at once, a line each.

>>> experiment = Experiment(rounds=5, method={"name": "fedprox", "mu": 0.1})
>>> experiment.method.options
{'mu': 0.1}
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from fedstill.core.errors import FedstillError, noting, suggest
from fedstill.core.limits import Positive
from fedstill.core.seeds import Sampling, cohort_size
from fedstill.core.types import Training
from fedstill.engine import check_engine
from fedstill.experiment.code_names import check_code
from fedstill.experiment.config_errors import collected, mistakes_of
from fedstill.experiment.model import check_mixture
from fedstill.loop.evaluate import EVALUATIONS, METRICS
from fedstill.loop.guard import Guard
from fedstill.methods import lookup, options
from fedstill.models.mixed import MIXED
from fedstill.privacy.plan import Privacy
from fedstill.storage import toml as toml_io

CREWS = ("ray", "spawned")  # values of engine.name by which clients are trained in other processes: see [cluster]


class _Section(BaseModel):
    """The rules that all sections share.

    A tuple has strict=False, because strict mode refuses the lists that TOML gives. A message about a mistake shows the
    first of a field's `examples`.
    """

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False, extra="forbid")


class _Choice(_Section):
    """A section that names a registered function and holds its options beside the name."""

    model_config = ConfigDict(extra="allow")

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


def _section(key: str = "") -> WrapValidator:
    """Report a section's mistakes beside the mistakes of other sections.

    key: lets a bare text stand for a section with one key: method = "fedavg" is method.name = "fedavg".
    """

    def read(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        with collected():
            return handler({key: value} if key and isinstance(value, str) else value)

    return WrapValidator(read)


def _checked_aggregate(text: str) -> str:
    with collected():
        lookup.aggregate_part(text)
    return text


def _checked_attack(text: str) -> str:
    with collected():
        lookup.attack_parts(text)
    return text


def _checked_engine(name: str) -> str:
    with collected():
        return name if name in CREWS else check_engine(name, CREWS)


def _checked_workers_engine(name: str) -> str:
    with collected():
        if name in CREWS:
            raise FedstillError(f"cluster.engine = '{name}' has workers of its own: choose auto, batched or looped")
        return check_engine(name)


def _checked_training(local: Training) -> Training:
    with collected():
        if local.nesterov and local.momentum == 0:
            raise FedstillError("local.nesterov needs momentum: set local.momentum, e.g. 0.9")
        if local.momentum and local.optimizer != "sgd":
            raise FedstillError(f"local.momentum belongs to sgd, not {local.optimizer}: set local.momentum = 0")
    return local


# what a cell of a column holds: a number, so many numbers, or one of these words
ColumnForm = Literal["numbers"] | int | Annotated[tuple[str, ...], Field(strict=False)]


class DataSection(_Section):
    """Where the data come from, how they are read, and which unlabeled data the server holds."""

    source: str = Field(default="digits", min_length=1)
    unlabeled: str | int = "none"
    unlabeled_limit: int | None = Field(default=None, ge=1, examples=[1000])
    validation: int = Field(default=0, ge=0)
    test: str | None = Field(default=None, min_length=1, examples=["mnist_m"])
    test_limit: int | None = Field(default=None, ge=1, examples=[10000])
    client_test_share: float = Field(default=0.0, ge=0, lt=1)  # of each client's rows, for a test of its own
    client_rows: int | None = Field(default=None, ge=1, examples=[20000])
    test_share: float = Field(default=0.2, gt=0, lt=1)  # of the rows that data.client_rows leaves to the server
    label: str | None = None
    inputs: tuple[str, ...] = Field(default=(), strict=False, examples=[["text"]])
    keys: tuple[str, ...] = Field(default=(), strict=False, examples=[["user"]])
    size: int | None = Field(default=None, ge=1, examples=[32])
    scale: Literal["train", "unlabeled", "none"] = "train"  # the rows whose mean and deviation scale the inputs
    mean: tuple[float, ...] = Field(default=(), strict=False, examples=[[0.5]])  # scale by these numbers instead
    std: tuple[Positive, ...] = Field(default=(), strict=False, examples=[[0.25]])
    drop: tuple[str, ...] = Field(default=(), strict=False, examples=[["patient_id"]])
    missing: Literal["refuse", "mean", "skip"] = "refuse"  # cells without a value, broken images
    unknown: Literal["refuse", "zeros"] = "refuse"  # words that the train rows do not have
    window: int | None = Field(default=None, ge=1, examples=[80])
    tokens: int | None = Field(default=None, ge=3, examples=[64])
    vocabulary: int = Field(default=8192, ge=1)  # most tokens that a tokenizer of ours learns
    tokenizer: str | None = Field(default=None, min_length=1, examples=["tokenizer.json"])
    # what parties agree on whose rows never meet; `fedstill deploy init` writes these keys
    classes: tuple[str, ...] = Field(default=(), strict=False, examples=[["benign", "malignant"]])  # in this order
    columns: dict[str, ColumnForm] = Field(default={}, examples=[{"age": "numbers"}])
    shape: tuple[int, ...] = Field(default=(), strict=False, examples=[[1, 28, 28]])  # channels, height, width

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        """Refuse keys that contradict each other, and keys that need another one."""
        if self.unlabeled == "central" and self.client_rows is None:
            raise FedstillError("data.unlabeled = 'central' needs data.client_rows: set it, e.g. 20000")
        if self.test is not None and self.client_rows is not None:
            raise FedstillError("data.test and data.client_rows both say what the test set is: remove one of them")
        if self.tokens is not None and self.window is not None:
            raise FedstillError(
                "data.window and data.tokens both say how text is read: keep data.window for the next character, "
                "data.tokens for the class of a text"
            )
        if self.tokenizer is not None and self.tokens is None:
            raise FedstillError("data.tokenizer needs the length of a text: set data.tokens, e.g. 64")
        if bool(self.mean) != bool(self.std):
            present, absent = ("mean", "std") if self.mean else ("std", "mean")
            raise FedstillError(f"data.{present} needs data.{absent} beside it: set both, e.g. data.{absent} = [0.5]")
        if self.columns and self.shape:
            raise FedstillError("data.columns is of tables and data.shape of images: remove one of them")
        if self.shape and len(self.shape) != 3:
            raise FedstillError("data.shape is (channels, height, width) of an image: e.g. data.shape = [1, 28, 28]")
        if self.shape and self.size is not None:
            raise FedstillError("data.shape and data.size both say how large images are: remove data.size")
        if len(set(self.classes)) < len(self.classes):
            raise FedstillError("data.classes names a class twice: name each once")
        for name, words in self.columns.items():
            if isinstance(words, tuple) and (not words or list(words) != sorted(set(words))):
                raise FedstillError(f"data.columns.{name} must name its words once, in the order of the alphabet")
        if self.columns and self.missing == "mean" and not self.mean:
            raise FedstillError(
                "data.columns with data.missing = 'mean' needs data.mean and data.std: data.mean fills the gaps"
            )
        if self.mean and self.scale == "none":
            raise FedstillError("data.scale = 'none' and data.mean both say how inputs are scaled: remove one of them")
        return self


class PartitionSection(_Choice):
    """How the training set is split over the clients; the options of the scheme stand beside its name."""

    scheme: str = "lda"
    clients: int = Field(default=100, ge=0)  # 0: all owners of a natural split

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        options.check("partition", self.scheme, self.options)
        return self


def _checked_clients(partition: PartitionSection, others: ValidationInfo) -> PartitionSection:
    """Check the cohort against the number of clients; a cohort that is wrong itself is not there."""
    cohort = others.data.get("cohort")
    with collected():
        if cohort is not None and cohort >= 1 and cohort != int(cohort):
            raise FedstillError(
                f"cohort = {cohort} must be a whole number of clients, or a share below 1: e.g. cohort = 0.1"
            )
        if partition.clients == 0 and partition.scheme != "natural":
            raise FedstillError("partition.clients = 0 means all owners of a natural split: use at least 1")
        if cohort is not None and partition.clients:
            cohort_size(cohort, partition.clients)
    return partition


class ModelSection(_Choice):
    """The network that is trained; its options stand beside its name."""

    name: str = "cnn"
    start: str | None = Field(default=None, min_length=1, examples=["runs/first"])  # a run or bundle to begin from

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        options.check("model", self.name, self.options)
        if self.name == MIXED:
            check_mixture(self.options)
        return self


class MethodSection(_Choice):
    """The method, or several methods as methods/lookup.py reads them; options of a single one may stand beside it."""

    name: str = "fedavg"
    _phases: tuple[lookup.PhaseText, ...] = ()

    @model_validator(mode="wrap")
    @classmethod
    def _read_text(cls, table: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Parse the name once. fedprox(mu=0.1) is the name fedprox and mu = 0.1 beside it."""
        text = table.get("name", "fedavg") if isinstance(table, dict) else None
        if not isinstance(text, str):
            return handler(table)
        phases = lookup.parse(text)
        beside = {key: value for key, value in table.items() if key != "name"}
        if len(phases) == 1 and len(phases[0].parts) == 1:
            (part,) = phases[0].parts
            if twice := part.options.keys() & beside.keys():
                raise FedstillError(f"method.{min(twice)} is set twice: in method.name and beside it")
            beside = {**part.options, **beside}
            table, phases = {"name": part.name, **beside}, (lookup.PhaseText((lookup.Part(part.name),)),)
        section = handler(table)
        section._phases = lookup.check_phase_texts(phases, beside)
        return section

    @property
    def phases(self) -> tuple[lookup.PhaseText, ...]:
        """The parsed text, with every option checked against the signature of its method."""
        return self._phases or lookup.check_phase_texts(lookup.parse(self.name), self.options)

    @property
    def is_single(self) -> bool:
        """Whether the text names one method, without a mixture and without a switch."""
        return len(self.phases) == 1 and len(self.phases[0].parts) == 1


class ServerSection(_Section):
    """How the server makes one model from the models of the cohort, whichever method runs."""

    aggregate: Annotated[str, AfterValidator(_checked_aggregate)] = Field(default="", examples=["median"])
    buffers: Literal["average", "pooled", "reset", "local"] = "average"  # BatchNorm statistics
    sealed: bool = False  # its steps see sums over the cohort, and no upload


class AttackSection(_Section):
    """What hostile clients of this simulation do; the run's seed chooses who they are. A deployment has no attacks."""

    name: Annotated[str, AfterValidator(_checked_attack)] = Field(default="", examples=["sign(factor=4.0)"])
    share: float = Field(default=0.2, gt=0, le=1)  # of the clients that hold data


class EngineSection(_Section):
    """The engine that trains the clients, and the device it runs on."""

    name: Annotated[str, AfterValidator(_checked_engine)] = "auto"
    device: str = Field(
        default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto, cpu, cuda or cuda:<number>"
    )
    chunk: int | None = Field(default=None, ge=1, examples=[16])
    precision: Literal["auto", "float32", "float64", "tf32", "bf16"] = "auto"
    graphs: bool | None = None
    compile: bool = False
    threads: int | None = Field(default=None, ge=1, le=1024, examples=[1])  # of torch on the CPU, while it runs


class ClusterSection(_Section):
    """The workers of engine.name = "ray" (actors of a Ray cluster) or "spawned" (processes of this machine)."""

    address: str = Field(default="local", min_length=1, examples=["auto"])  # of Ray: local, auto, or host:port
    actors: int = Field(default=2, ge=1)
    cpus: float = Field(default=1.0, gt=0)  # of an actor; whole ones are its torch threads, unless engine.threads says
    gpus: float | None = Field(default=None, ge=0, examples=[0.5])  # of an actor; None: all GPUs, divided among them
    engine: Annotated[str, AfterValidator(_checked_workers_engine)] = "auto"  # of each worker, and of the server


class CompareSection(_Section):
    """The methods, or a sweep's points, and the number of seeds that `compare` takes when its caller names none."""

    methods: tuple[str, ...] = Field(default=(), strict=False, examples=[["fedavg", "fedntd"]])
    attacks: tuple[str, ...] = Field(default=(), strict=False, examples=[["sign:0.2"]])  # each method also under each
    over: tuple[str, ...] = Field(default=(), strict=False, examples=[["local.lr=0.01,0.1"]])  # a sweep, not methods
    search: int = Field(default=0, ge=0)  # trials that search the ranges of `over`; 0: every point of the grid
    seeds: int = Field(default=3, ge=1)
    references: bool = False  # also measure the majority class, each client alone and all data pooled; in `run`, too
    jobs: int = Field(default=1, ge=1)  # runs at a time, each in a process of its own


def _checked_references(compare: CompareSection, others: ValidationInfo) -> CompareSection:
    model = others.data.get("model")
    with collected():
        if compare.references and model is not None and model.name == MIXED:
            raise FedstillError(
                f"compare.references = true needs one network for all clients: model.name = '{MIXED}' has several; set "
                "it to false, or choose one network"
            )
    return compare


class EarlyStopSection(_Section):
    """When a run ends before its last round: after `patience` evaluations without a better value of the metric."""

    patience: int | None = Field(default=None, ge=1, examples=[5])  # None: a run never ends early
    metric: str | None = Field(default=None, min_length=1, examples=["macro_f1"])  # None: the metric of `best`
    margin: float = Field(default=0.0, ge=0)  # a value is better if it is better by more than this

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.metric is not None and self.patience is None:
            raise FedstillError("early_stop.metric needs early_stop.patience: set it, e.g. early_stop.patience = 5")
        return self


def _check_metric(key: str, metric: str | None, others: ValidationInfo) -> None:
    """Refuse a metric that no evaluation of ours measures; an evaluation of one's own may measure any."""
    with collected():
        if metric is not None and others.data.get("evaluate") in EVALUATIONS and metric not in METRICS:
            raise FedstillError(f"{key} = '{metric}' is no metric: {suggest(metric, METRICS)}")


def _checked_best(best: str, others: ValidationInfo) -> str:
    _check_metric("best", best, others)
    return best


def _checked_early_stop(section: EarlyStopSection, others: ValidationInfo) -> EarlyStopSection:
    _check_metric("early_stop.metric", section.metric, others)
    return section


class Experiment(_Section):
    """Everything that decides a run. `Experiment.from_toml(path)` reads it, `.to_toml()` writes it."""

    name: str = Field(
        default="experiment",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="letters, digits, '.', '_' and '-' (it names the run's folder)",
    )
    rounds: int = Field(default=100, ge=1)
    cohort: int | float = Field(default=10, gt=0)
    sampling: Sampling = "fixed"
    seed: int = Field(default=0, ge=0, lt=2**63)
    evaluate_every: int = Field(default=1, ge=1)
    evaluate: str = Field(default="global_test", min_length=1)  # how good a model is: a name or FILE.py:function
    best: Annotated[str, AfterValidator(_checked_best)] = Field(  # the metric that chooses the best model
        default="accuracy", min_length=1, examples=["macro_f1"]
    )
    checkpoint_every: int = Field(default=10, ge=1)
    target: float | None = Field(default=None, gt=0, le=1, examples=[0.7])
    track: tuple[Literal["tensorboard", "mlflow", "wandb", "trackio"], ...] = Field(
        default=(), strict=False, examples=[["tensorboard"]]
    )
    early_stop: Annotated[EarlyStopSection, _section(), AfterValidator(_checked_early_stop)] = EarlyStopSection()
    data: Annotated[DataSection, _section("source")] = DataSection()
    partition: Annotated[PartitionSection, _section("scheme"), AfterValidator(_checked_clients)] = Field(
        default=PartitionSection(), validate_default=True
    )
    model: Annotated[ModelSection, _section("name")] = ModelSection()
    local: Annotated[Training, AfterValidator(_checked_training)] = Training()
    method: Annotated[MethodSection, _section("name")] = MethodSection()
    server: Annotated[ServerSection, _section("aggregate")] = ServerSection()
    engine: Annotated[EngineSection, _section("name")] = EngineSection()
    attack: Annotated[AttackSection, _section("name")] = AttackSection()
    cluster: Annotated[ClusterSection, _section("address")] = ClusterSection()
    guard: Annotated[Guard, _section()] = Guard()
    privacy: Annotated[Privacy, _section()] = Privacy()
    compare: Annotated[CompareSection, AfterValidator(_checked_references)] = CompareSection()

    @model_validator(mode="wrap")
    @classmethod
    def _report_all(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Raise all mistakes as one FedstillError."""
        if isinstance(data, dict) and "algorithm" in data:
            raise FedstillError("[algorithm] is now called [method]: rename the section, its keys stay the same")
        try:
            return handler(data)
        except ValidationError as error:
            mistakes = mistakes_of(error, cls)
            lines = list(mistakes.values())
            for name, kind in (("partition", PartitionSection), ("model", ModelSection), ("method", MethodSection)):
                if isinstance(section := data.get(name), dict):
                    # where another key of the section is wrong, pydantic has not come to its options
                    sound = {key: value for key, value in section.items() if f"{name}.{key}" not in mistakes}
                    with noting(lines), suppress(ValidationError):
                        kind.model_validate(sound)
            raise FedstillError(*dict.fromkeys(lines)) from None

    def __repr__(self) -> str:
        model, data = (text.rpartition("/")[2] for text in (self.model.name, self.data.source))
        names = f"{lookup.label(self.method.name)} trains {model} on {data}"
        clients = f"{self.partition.scheme} over {self.partition.clients or 'all'} clients"
        return f"Experiment('{self.name}': {names}, {clients}, {self.rounds} rounds, seed {self.seed})"

    __str__ = __repr__

    @classmethod
    def from_toml(cls, path: str | Path) -> Self:
        """Read an experiment file. Code that it names runs only if `fedstill.allow` or `fedstill allow` allowed it."""
        table = toml_io.read_toml(Path(path))
        check_code(table, path)
        return cls.model_validate(table)

    @classmethod
    def quickstart(cls) -> Self:
        """Return the embedded experiment that `fedstill run` and `fedstill compare` take without a file."""
        return cls.model_validate(quickstart_table())

    def replace(self, **changes: Any) -> Self:
        """Return a checked copy with top-level keys or whole sections changed.

        Keys that a changed section does not name have their defaults.
        """
        return type(self).model_validate({**self.model_dump(), **changes})

    def resolved(self) -> dict[str, Any]:
        """Return the experiment as a table with all options of partition, model and method, the defaults too."""
        single = self.method.is_single
        method = options.resolved("method", self.method.name, self.method.options) if single else {}
        full = {
            "partition": options.defaults("partition", self.partition.scheme) | self.partition.model_dump(),
            "model": options.defaults("model", self.model.name) | self.model.model_dump(),
            "method": self.method.model_dump() | method,
        }
        return self.model_dump() | full

    def options_text(self) -> str:
        """Return all options that decide a release as one text, which does not change when a user's file moves.

        Noise follows from it. So options that came later are left out at their defaults, to keep the noise of old runs.
        """
        table = self.resolved()
        method = {key: value for key, value in table["method"].items() if (key, value) != ("bands", 1)}
        method |= {"name": lookup.label(self.method.name)}
        model = {key: value for key, value in table["model"].items() if (key, value) != ("start", None)}
        known = {
            "method": method,
            "model": model,
            **{section: table[section] for section in ("guard", "server", "engine")},
        }
        known |= {"attack": table["attack"]} if self.attack.name else {}
        return json.dumps(known, sort_keys=True)

    def with_scale_of(self, mean: tuple[float, ...], std: tuple[float, ...]) -> Self:
        """Return a copy that holds the numbers of scale = "unlabeled", because the unlabeled data may change later."""
        if self.data.scale != "unlabeled" or self.data.mean:
            return self
        return self.model_copy(update={"data": self.data.model_copy(update={"mean": mean, "std": std})})

    def to_toml(self) -> str:
        return toml_io.dumps(self.model_dump())

    def digest(self) -> str:
        """Return eight letters that change when anything in the experiment changes."""
        text = json.dumps(self.model_dump(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    def cohort_size(self, population: int) -> int:
        """Return the number of clients in a round; a `cohort` below 1 is a share of the population."""
        return cohort_size(self.cohort, population)


def checked_experiment(value: object) -> Experiment:
    """Return an Experiment as it is, and refuse the path of a file or its table with a line of how to read it."""
    if isinstance(value, Experiment):
        return value
    if isinstance(value, (str, Path)):
        raise FedstillError(f"'{value}' is no experiment yet: read it with fedstill.Experiment.from_toml('{value}')")
    cure = "fedstill.Experiment(**table)" if isinstance(value, dict) else "fedstill.Experiment(rounds=20)"
    raise FedstillError(f"{type(value).__name__} is no fedstill.Experiment: give one, e.g. {cure}")


def quickstart_table() -> dict[str, Any]:
    text = resources.files("fedstill").joinpath("quickstart.toml").read_text(encoding="utf-8")
    return toml_io.loads(text, where="quickstart.toml")
