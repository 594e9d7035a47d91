"""From a preset's name or a TOML file, and `--set`, to a Card: every choice made, every name known.

The file's keys are the fields of Card, Workload and Variant. Three things are shorter than in the schema: `temperature`
may stand beside the other fields of a workload; a list as `input_tokens` or `temperature` makes one workload of each
item; and unless they are given, a variant with `accept_length` has drafter `scripted` and acceptance `pinned`, and
`acceptance` is otherwise `off` for drafter none and `real` for any other.
"""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Any

from soloist.bench.decode import from_dict
from soloist.bench.records import ACCEPTANCES, Card, Variant, Workload
from soloist.config import DRAFTERS, MAX_WINDOW, EngineConfig, SamplingParams
from soloist.errors import UserError

SWEPT = ("input_tokens", "temperature")
CARD = {f.name for f in dataclasses.fields(Card)} - {"workloads", "variants", "target", "weights", "tokenizer"}
WORKLOAD = {f.name for f in dataclasses.fields(Workload)} | {"temperature"}
VARIANT = {f.name for f in dataclasses.fields(Variant)}
SETTINGS = {f.name for f in dataclasses.fields(EngineConfig)} - {"model", "drafter", "draft_width", "prefix_cache_bytes"}


def presets() -> dict[str, str]:
    """Name of every preset -> its first comment line."""
    folder = files("soloist.bench") / "presets"
    found = {f.name.removesuffix(".toml"): f.read_text() for f in folder.iterdir() if f.name.endswith(".toml")}
    return {name: text.splitlines()[0].removeprefix("# ") for name, text in sorted(found.items())}


def load_card(source: str, changes: Sequence[str] = (), added: Sequence[str] = ()) -> Card:
    """Args: source: a preset or a path of a TOML file; changes: `key=value`, see `apply_change`; added: see `add_variant`.

    Raises: UserError for what cannot be read, names nothing, or contradicts itself.
    """
    path = Path(source)
    if path.suffix == ".toml" or path.exists():
        try:
            text = path.read_text()
        except OSError as error:
            raise UserError(f"{source}: cannot be read ({(error.strerror or str(error)).lower()})") from error
    elif source in presets():
        text = (files("soloist.bench") / "presets" / f"{source}.toml").read_text()
    else:
        raise UserError(f"{source}: no such preset or file; presets are {', '.join(presets())}")
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{source}: is not TOML ({error})") from error
    table.setdefault("name", path.stem)
    for change in changes:
        apply_change(table, change)
    for text in added:
        add_variant(table, text)
    return card_of(table, source)


def card_of(table: dict[str, Any], source: str) -> Card:
    """A card from parsed TOML."""
    workloads = [each for raw in _tables(table, "workloads", source) for each in _expand(raw)]
    variants = [_acceptance(raw) for raw in _tables(table, "variants", source)]
    card = from_dict(Card, {**table, "workloads": workloads, "variants": variants}, source)
    check(card, source)
    return card


def apply_change(table: dict[str, Any], change: str) -> None:
    """`key=value`: a field of Card; a field of every workload; a setting of the engine; `workload.NAME.FIELD` or
    `variant.NAME.FIELD` of one. The value is TOML, and text without quotes where it is none.
    """
    key, equals, value = change.partition("=")
    key = key.strip()
    if not equals:
        raise UserError(f"--set {change}: must be KEY=VALUE")
    parsed = _value(value)
    kind, _, rest = key.partition(".")
    name, _, fieldname = rest.rpartition(".")
    if kind in ("workload", "variant") and name:
        known = WORKLOAD if kind == "workload" else VARIANT
        chosen = [each for each in table.get(f"{kind}s", []) if each.get("name") == name]
        if not chosen:
            there = ", ".join(str(each.get("name")) for each in table.get(f"{kind}s", []))
            raise UserError(f"--set {key}: the card has no {kind} {name!r}; it has {there}")
        _known(key, fieldname, known)
        for each in chosen:
            each[fieldname] = parsed
    elif key in CARD:
        table[key] = parsed
    elif key in WORKLOAD:
        for each in table.get("workloads", []):
            each[key] = parsed
    elif key in SETTINGS:
        table.setdefault("settings", {})[key] = parsed
    else:
        if key in VARIANT:
            names = ", ".join(str(each.get("name")) for each in table.get("variants", []))
            raise UserError(f"--set {key}: belongs to one variant; write variant.NAME.{key}=VALUE, NAME one of {names}")
        _known(key, key, CARD | WORKLOAD | SETTINGS)


def add_variant(table: dict[str, Any], text: str) -> None:
    """`NAME:KEY=VALUE,KEY=VALUE`: one more variant, with fields of Variant and settings of the engine.

    Raises: UserError for a key that is neither.
    """
    name, colon, rest = text.partition(":")
    pairs = [part.partition("=") for part in rest.split(",")]
    if not name or not colon or not all(equals for _, equals, _ in pairs):
        raise UserError(f"--add {text}: must be NAME:KEY=VALUE,KEY=VALUE, as NEXTN:drafter=mtp,draft_width=3")
    variant: dict[str, Any] = {"name": name}
    for key, _, value in pairs:
        _known(f"--add {text}", key, VARIANT | SETTINGS)
        place = variant if key in VARIANT else variant.setdefault("settings", {})
        place[key] = _value(value)
    table["variants"] = [*_tables(table, "variants", "the card"), variant]


def _value(text: str) -> Any:
    """Of a TOML value, or the text itself where it is none: names need no quotes."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text.strip()


def check(card: Card, source: str) -> None:
    """Raises: UserError for a card that contradicts itself."""
    for kind, names in (("workload", [w.name for w in card.workloads]), ("variant", [v.name for v in card.variants])):
        if not names:
            raise UserError(f"{source}: has no {kind}; add [[{kind}s]]")
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise UserError(f"{source}: two {kind}s are called {min(twice)!r}; names must differ")
    for name, value, least in (("repeats", card.repeats, 1), ("warm_up", card.warm_up, 0)):
        if value < least:
            raise UserError(f"{source}: {name}={value} must be at least {least}")
    if card.seconds is not None and not 0 < card.seconds < math.inf:
        raise UserError(f"{source}: seconds={card.seconds:g} must be above 0, and end")
    for workload in card.workloads:
        _check_workload(workload, f"{source}: workload {workload.name}")
    for variant in card.variants:
        _check_variant(variant, f"{source}: variant {variant.name}")
        for key in {**card.settings, **variant.settings}:
            _known(f"settings of {source}", key, SETTINGS)


def sampling_params(workload: Workload, seed: int) -> dict[str, Any]:
    """What a request of this workload asks for, as fields of SamplingParams."""
    asked = {"temperature": 0.0, **workload.sampling, "max_tokens": workload.output_tokens}
    if asked["temperature"]:
        asked.setdefault("seed", seed)
    return {**asked, "ignore_eos": workload.ignore_eos}


def _check_workload(workload: Workload, where: str) -> None:
    for name, value in (("num_prompts", workload.num_prompts), ("output_tokens", workload.output_tokens)):
        if value < 1:
            raise UserError(f"{where}: {name}={value} must be at least 1")
    if workload.input_tokens is not None and workload.input_tokens < 1:
        raise UserError(f"{where}: input_tokens={workload.input_tokens} must be at least 1")
    if workload.cache not in ("cold", "warm"):
        raise UserError(f"{where}: cache={workload.cache!r} is not one of cold, warm")
    for name in workload.sampling:
        _known(f"{where}: sampling", name, {f.name for f in dataclasses.fields(SamplingParams)})
    SamplingParams(**sampling_params(workload, 0))


def _check_variant(variant: Variant, where: str) -> None:
    if variant.drafter not in DRAFTERS:
        raise UserError(f"{where}: drafter={variant.drafter!r} is not one of {', '.join(DRAFTERS)}")
    if variant.acceptance not in ACCEPTANCES:
        raise UserError(f"{where}: acceptance={variant.acceptance!r} is not one of {', '.join(ACCEPTANCES)}")
    if (variant.acceptance == "off") != (variant.drafter == "none"):
        raise UserError(f"{where}: acceptance=off goes with drafter=none, and with no other; drafter={variant.drafter}")
    pinned = variant.acceptance == "pinned"
    if pinned != (variant.accept_length is not None) or pinned and variant.drafter != "scripted":
        raise UserError(f"{where}: acceptance=pinned, accept_length and drafter=scripted go together; give all or none")
    if variant.accept_length is not None:
        width = variant.draft_width
        if not isinstance(width, int) or not 1 <= width < MAX_WINDOW:
            raise UserError(f"{where}: pinned acceptance needs draft_width from 1 to {MAX_WINDOW - 1}, got {width!r}")
        if not 1 <= variant.accept_length <= width + 1:
            raise UserError(f"{where}: accept_length={variant.accept_length:g} must be from 1 to draft_width + 1")


def _expand(raw: dict[str, Any]) -> Iterable[dict[str, Any]]:
    """One workload for every combination of the items of the swept keys."""
    swept = next((key for key in SWEPT if isinstance(raw.get(key), list)), None)
    if swept is not None:
        for item in raw[swept]:
            mark = f"@{item}" if swept == "input_tokens" else f" T={item:g}"
            yield from _expand({**raw, swept: item, "name": f"{raw.get('name', '')}{mark}"})
        return
    rest = {key: value for key, value in raw.items() if key != "temperature"}
    if "temperature" in raw:
        rest["sampling"] = {**raw.get("sampling", {}), "temperature": raw["temperature"]}
    yield rest


def _acceptance(raw: dict[str, Any]) -> dict[str, Any]:
    if "accept_length" in raw:
        return {"drafter": "scripted", "acceptance": "pinned", **raw}
    return {"acceptance": "off" if raw.get("drafter", "none") == "none" else "real", **raw}


def _tables(table: dict[str, Any], key: str, source: str) -> list[dict[str, Any]]:
    found = table.get(key, [])
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise UserError(f"{source}: {key} must be tables, each under [[{key}]]")
    return found


def _known(where: str, name: str, known: Iterable[str]) -> None:
    if name not in known:
        near = get_close_matches(name, sorted(known), 1)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(known))}"
        raise UserError(f"{where}: unknown key {name!r}; {hint}")
