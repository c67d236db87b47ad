"""A Hugging Face model as files: its `config.json`, its safetensors and how they fit a model of ours. No torch.

`open_huggingface` finds the files, `model_problems` compares the configuration with `model.*`, `match` says where each
of our parameters lies. Everything that stands against the weights is told at once; nothing is downloaded, converted
or guessed. Values are read in `huggingface_read.py`, other checkpoints in `read.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch, fnmatchcase
from typing import Any

from models.huggingface import HEAD_WEIGHT, ForeignWeight
from models.parameters import ModelSizes, attention_biases, head_features, key_value_heads
from models.registry import family
from models.spec import parameter_specs
from orchestrator.checkpoint.folder import Location
from orchestrator.checkpoint.safetensors_file import ITEM_BYTES, StoredTensor, read_header, same_values
from orchestrator.checkpoint.storage import Folder, LocalFolder, StorageError, open_folder
from orchestrator.config.model_folder import CONFIG_NAME, MANIFEST_NAME, FolderError, json_object
from orchestrator.config.schema.model import ModelConfig
from orchestrator.config.urls import is_url
from orchestrator.errors import Problem

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"

_WEIGHTS = ".safetensors"
_INDEX = ".safetensors.index.json"
_NAMES_SHOWN = 20
_OTHER_FORMATS = ("*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack")
FETCH = "fetch a model first, for example with `hf download NAME --local-dir FOLDER`"
FREE_KEYS = ("attention_dropout", "resid_pdrop", "initializer_range")
"""Keys of a model that its weights do not depend on."""


@dataclass(frozen=True, slots=True)
class HuggingFaceFolder:
    """A model as files."""

    folder: Folder
    config: dict[str, Any]
    """Its `config.json`."""
    tensors: dict[str, StoredTensor]
    """Every tensor of its safetensors files, by foreign name."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where the values of one of our parameters lie."""

    weight: ForeignWeight
    tensor: StoredTensor


def is_huggingface(place: Location) -> bool:
    """Whether a path or URL means a Hugging Face model rather than one of our checkpoints.

    Raises StorageError when an object store does not answer.
    """
    folder, file = _folder_and_file(place)
    if file is not None:
        return True
    if folder.has(MANIFEST_NAME):
        return False
    return folder.has(CONFIG_NAME) or any(name.endswith(_WEIGHTS) for name in _names(folder))


def open_huggingface(place: Location) -> HuggingFaceFolder:
    """Read the configuration and the headers of a folder, of one safetensors file or of an index in it.

    Raises:
        FolderError: with everything that is missing, cut or in another format.
        StorageError: an object store does not answer.
    """
    folder, file = _folder_and_file(place)
    names = _names(folder)
    if not names:
        raise FolderError([f"it does not exist or holds nothing, and nothing is downloaded: {FETCH}"])
    faults: list[str] = []
    config = _json(folder, CONFIG_NAME, faults)
    tensors = _tensors(folder, names, file, faults)
    if faults:
        raise FolderError(faults)
    return HuggingFaceFolder(folder, config, tensors)


def _folder_and_file(place: Location) -> tuple[Folder, str | None]:
    """The folder that is meant, and the safetensors file or index in it where it is named itself."""
    folder = open_folder(place)
    if folder.name.endswith((_WEIGHTS, _INDEX)) and folder.parent().has(folder.name):
        return folder.parent(), folder.name
    return folder, None


def _names(folder: Folder) -> list[str]:
    """Names of the files in a folder, without those in folders of it."""
    return sorted(name for name in folder.files() if "/" not in name)


def refusals_of_target(target: Folder, key: str) -> list[Problem]:
    """Why an import or an export cannot be written there; nothing is ever written over."""
    if isinstance(target, LocalFolder):
        if not target.path.exists() and not target.path.is_symlink():
            return []
        fix = "Give a folder that does not exist yet."
        return [Problem(key, f"{target} exists, and nothing is written over.", fix)]
    try:
        names = sorted(target.files())
    except StorageError as error:
        return [Problem(key, f"{error.message}.", error.fix)]
    if not names:
        return []
    fix = "Give a prefix under which nothing lies yet."
    return [Problem(key, f"{target} holds {_shown(names, 3)}, and nothing is written over.", fix)]


def model_problems(what: str, place: str, stored: ModelConfig, asked: ModelConfig) -> list[Problem]:
    """Every `model.*` key that asks for another model than the stored weights are of.

    Args:
        what: the weights, as they were named (`checkpoint.init_from=FOLDER`).
        place: the folder, as it was typed.
        stored: the model of its `config.json`.
        asked: `model.*` of the run.
    """
    every = "" if is_url(place) else f"; `model={place}` takes every size from there"
    return [
        Problem(
            f"model.{name}",
            f"{what} has {name}={as_word(theirs)}, model.{name}={as_word(ours)} is asked for: its weights do not fit.",
            f"Set model.{name}={as_word(theirs)}{every}.",
        )
        for name, (theirs, ours) in _differences(stored, asked).items()
    ]


def _differences(stored: ModelConfig, asked: ModelConfig) -> dict[str, tuple[Any, Any]]:
    if stored.family != asked.family:
        return {"family": (stored.family, asked.family)}
    free = {*FREE_KEYS, *(() if stored.family == "gpt" else ("max_position_embeddings",))}
    if stored.family == "gpt":
        free |= {"rope_theta", "rope_scaling", "sliding_window"}
    theirs, ours = _resolved(stored), _resolved(asked)
    found = {name: (theirs[name], ours[name]) for name in theirs if theirs[name] != ours[name] and name not in free}
    if asked.head_dim is None and found.keys() & {"hidden_size", "num_attention_heads"}:
        found.pop("head_dim", None)  # follows from these
    return found


def _resolved(model: ModelConfig) -> dict[str, Any]:
    """The sizes with every null that stands for a value written out."""
    values = model.model_dump()
    inner, outer = attention_biases(model, default=model.family == "gpt")
    return values | {
        "num_key_value_heads": key_value_heads(model),
        "head_dim": head_features(model),
        "attention_bias": inner,
        "attention_output_bias": outer,
    }


def as_word(value: Any) -> str:
    """A value as it is typed on the command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{as_word(entry)}" for key, entry in value.items()) + "}"
    return str(value)


def match(folder: HuggingFaceFolder, sizes: ModelSizes) -> dict[str, Source]:
    """Where each parameter of the model lies, by our name; a tied head has no entry.

    Raises FolderError listing missing and extra tensors, wrong shapes, types that hold no weights, and a head
    that should be the embedding and is not.
    """
    kind = family(sizes.family)
    tensors = {
        name: tensor
        for name, tensor in folder.tensors.items()
        if not any(fnmatchcase(name, pattern) for pattern in kind.ignored_weights)
    }
    prefix = kind.foreign_prefix
    bare = not any(name.startswith(prefix) for name in tensors)
    sources, missing, faults = {}, [], []
    shapes = {spec.name: spec.shape for spec in parameter_specs(sizes)}
    used = set()
    for weight in kind.foreign_weights(sizes):
        name = weight.foreign.removeprefix(prefix) if bare else weight.foreign
        tensor = tensors.get(name)
        if tensor is None:
            missing.append(name)
            continue
        used.add(name)
        wanted = weight.foreign_shape(shapes[weight.name])
        if tensor.shape != wanted:
            faults.append(f"{name} has shape {list(tensor.shape)}, the model has {list(wanted)}")
        elif tensor.dtype not in ITEM_BYTES:
            faults.append(f"{name} is {tensor.dtype}, and only {', '.join(ITEM_BYTES)} are read as weights")
        sources[weight.name] = Source(weight, tensor)
    faults += _tie_faults(sizes, tensors, sources)
    extra = sorted(set(tensors) - used - ({HEAD_WEIGHT} if sizes.tie_word_embeddings else set()))
    for what, names in (("missing", missing), ("not part of the model", extra)):
        if names:
            faults.append(f"{len(names)} tensors are {what}: {_shown(names)}")
    if faults:
        raise FolderError(dict.fromkeys(faults))
    return sources


def _tie_faults(sizes: ModelSizes, tensors: Mapping[str, StoredTensor], sources: Mapping[str, Source]) -> list[str]:
    """A file of a tied model may hold the head all the same; then it must be the embedding."""
    head, embedding = tensors.get(HEAD_WEIGHT), sources.get("embedding.weight")
    if not sizes.tie_word_embeddings or head is None or embedding is None:
        return []
    if same_values(head, embedding.tensor):
        return []
    return [
        f"{HEAD_WEIGHT} differs from {embedding.tensor.name}, and tie_word_embeddings=true says that they are one "
        f"matrix (if they are not, {CONFIG_NAME} and model.tie_word_embeddings must say false)"
    ]


def _tensors(folder: Folder, names: Collection[str], asked: str | None, faults: list[str]) -> dict[str, StoredTensor]:
    """Of the file or index that was asked for, or of what a folder holds."""
    if asked is not None:
        return _headers(folder, [asked], faults) if asked.endswith(_WEIGHTS) else _indexed(folder, asked, faults)
    if WEIGHTS_NAME in names:
        return _headers(folder, [WEIGHTS_NAME], faults)
    if INDEX_NAME in names:
        return _indexed(folder, INDEX_NAME, faults)
    single = [name for name in names if name.endswith(_WEIGHTS)]
    if len(single) == 1:
        return _headers(folder, single, faults)
    if single:
        faults.append(f"{len(single)} safetensors files and no {INDEX_NAME} that says which belong to the model")
    else:
        others = sorted(name for name in names if any(fnmatch(name, pattern) for pattern in _OTHER_FORMATS))
        found = f" (there is {', '.join(others[:3])}: save it again as safetensors)" if others else ""
        faults.append(f"neither {WEIGHTS_NAME} nor {INDEX_NAME} is there{found}")
    return {}


def _indexed(folder: Folder, index: str, faults: list[str]) -> dict[str, StoredTensor]:
    places = _json(folder, index, faults).get("weight_map")
    if not isinstance(places, dict):
        faults.append(f"{index} has no weight_map")
        return {}
    found = _headers(folder, sorted(set(map(str, places.values()))), faults)
    here = {name: tensor for name, tensor in found.items() if name in places}
    wrong = sorted(name for name, file in places.items() if name not in here or here[name].file != str(file))
    if wrong and not faults:
        faults.append(f"{len(wrong)} tensors are not in the file that {index} names: {_shown(wrong)}")
    unlisted = sorted(set(found) - set(places))
    if unlisted:
        faults.append(f"{len(unlisted)} tensors are in files of {index} but not in it: {_shown(unlisted)}")
    return here


def _headers(folder: Folder, files: list[str], faults: list[str]) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        try:
            tensors |= read_header(folder, file)
        except ValueError as error:
            faults.append(f"{file}: {error}")
    return tensors


def _json(folder: Folder, name: str, faults: list[str]) -> dict[str, Any]:
    try:
        return json_object(name, folder.read(name))
    except FileNotFoundError:
        faults.append(f"{name} is missing")
    except FolderError as error:
        faults += error.faults
    except StorageError:
        raise
    except OSError as error:
        faults.append(f"{name} cannot be read ({error})")
    return {}


def _shown(names: list[str], most: int = _NAMES_SHOWN) -> str:
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")
