"""Reads other libraries' JSON into constructor arguments; refuses fields that it does not know."""

from collections.abc import Iterable

from ...errors import InputError
from ...version import __version__
from ..checks import Check, enforce, shown
from ..config import ARGUMENTS

CONFIG = "config.json"
_REMOVE = "remove it where it changes nothing that the model computes"
# Fields of text generation and the like, which transformers 4 writes into every config.json; a ViT ignores them.
OF_TEXT = """
    bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id forced_bos_token_id forced_eos_token_id
    tokenizer_class prefix tie_encoder_decoder max_length min_length do_sample early_stopping num_beams num_beam_groups
    diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores return_dict_in_generate
    remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
""".split()


def refuse_unknown(fields: Iterable[str], expected: Iterable[str], where: str, remedy: str = _REMOVE) -> None:
    """Raises InputError for a field that is not expected, since it may change what the model computes."""
    if odd := sorted(set(fields) - set(expected)):
        raise InputError(f"{where} has {shown(odd[0])}, which vitfast {__version__} does not know; {remedy}")


def section(config: dict, name: str, where: str = CONFIG) -> dict:
    """Returns the object in a field, {} if it is absent or null. Raises InputError for anything else."""
    value = config.get(name)
    if value is not None and not isinstance(value, dict):
        raise InputError(f"{where}: {name} must be an object, got {shown(value)}")
    return value or {}


def read(config: dict, field: str, check: Check, where: str = CONFIG):
    """Returns the value of a field, which must pass the check; None where it is absent or null."""
    value = config.get(field)
    return None if value is None else enforce(check, value, f"{where}: {field}")


def read_fields(config: dict, table: dict, where: str = CONFIG) -> tuple[dict, list[str]]:
    """Returns the constructor arguments that a JSON object states, and notes for the log.

    table: the meaning of each field that may be there: the name of a constructor argument; {activation there: ours}; a
    tuple of the values at which the ViT computes the same; RATE for a dropout that the ViT lacks, which would act in
    training alone; None for a field that does not change the model. Fields that are null are ignored. Raises InputError
    for other fields and values.
    """
    refuse_unknown(config, table, where)
    args, notes = {}, []
    for field, meaning in table.items():
        value = config.get(field)
        if value is None or meaning is None:
            continue
        if isinstance(meaning, str):
            args[meaning] = read(config, field, ARGUMENTS[meaning], where)
        elif isinstance(meaning, dict):
            if not isinstance(value, str) or value not in meaning:
                names = ", ".join(meaning)
                raise InputError(f"{where}: activation {shown(value)} is not supported; known are {names}")
            args["act_layer"] = meaning[value]
        elif isinstance(meaning, tuple):
            if not any(value == one and type(value) is type(one) for one in meaning):
                wanted = " or ".join(map(repr, meaning))
                raise InputError(f"{where}: {field} must be {wanted} for a ViT like ours, got {shown(value)}")
        elif rate := read(config, field, meaning, where):
            notes.append(f"{field}={rate} is not taken over, the ViT has no dropout there")
    return args, notes


def class_names(config: dict, count: int) -> tuple[tuple[str, ...] | None, list[str]]:
    """Returns the names of `count` classes in the JSON of timm or Hugging Face, and notes for the log.

    The JSON has a list, or an object with class numbers as keys. The names are None if there are none, if the
    JSON does not have one for each class (which a note says), and if transformers filled in LABEL_0, LABEL_1 and so on.
    """
    parts = [part for part in (config, config.get("pretrained_cfg")) if part]
    fields = [(name, part[name]) for part in parts for name in ("label_names", "labels", "id2label") if part.get(name)]
    if not fields or not count:
        return None, []
    field, value = fields[0]
    try:
        pairs = [(int(key), name) for key, name in (value.items() if isinstance(value, dict) else enumerate(value))]
        numbered = dict(pairs)
    except (TypeError, ValueError):
        pairs, numbered = [], {0: None}
    if isinstance(value, str) or not all(isinstance(name, str) for name in numbered.values()):
        raise InputError(f"config.json: {field} must be names of classes, got {shown(value)}")
    if len(numbered) < len(pairs):
        twice = next(i for i, _ in pairs if sum(j == i for j, _ in pairs) > 1)
        raise InputError(f"config.json: {field} names class {twice} twice; leave one of the two")
    if field == "id2label" and all(name == f"LABEL_{i}" for i, name in numbered.items()):
        return None, []
    if numbered.keys() != set(range(count)):
        return None, [f"{field} is not taken over: it has {len(numbered)} names, not one for each of {count} classes"]
    return tuple(numbered[i] for i in range(count)), []
