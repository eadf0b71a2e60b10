"""A checkpoint's README.md: what was done to the model, what is known of it, how to load it."""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from compress.report import words
from compress.report.pages import TEMPLATES, environment
from compress.text.documents import PYTHON_DOCS

STAGES = ("plan", "shrink", "calibrate", "allocate", "quantize", "distill", "extend", "score")
"""Those of which a card tells."""

Metrics = Mapping[str, Mapping[str, Any]]


def model_card(
    recipe: str, model: str, metrics_by_stage: Metrics, report: Mapping[str, Any] | None = None
) -> str:
    """The card of a checkpoint made by `recipe` from `model` (a hub id, or a path).

    `metrics_by_stage` maps the stages that ran (plan, calibrate, allocate, quantize, ..., score)
    to their figures; a part of the card whose stage did not run is left out. Without `report` the
    text holds no time, date or path of this machine: equal inputs give equal bytes, as the rest of
    the checkpoint does. report: the contents of report.json, of which the card then has the sizes,
    the verdict, and the speed with the machine that it was measured on.
    """
    stages = {name: metrics_by_stage.get(name) for name in STAGES}
    name = model_name(model)
    scheme = _scheme(stages)
    # Markdown, made of our own figures: nothing to escape.
    template = environment(TEMPLATES, escape=False).get_template("card.md.jinja")
    return template.render(
        front_matter=_front_matter(recipe, model, scheme),
        recipe=recipe,
        name=name,
        scheme=scheme,
        kept=_kinds((stages["plan"] or {}).get("kept", [])),
        fused=not _mixed_qkv(stages["plan"]),
        activations_quantized=scheme.startswith("W8A8"),
        extended=bool((stages["extend"] or {}).get("method")),
        **_size_after(stages, report),
        report=report,
        words=words,
        python_docs=(stages["calibrate"] or {}).get("source") == PYTHON_DOCS,
        **stages,
    )


def model_name(model: str) -> str:
    """The model's name without the path of this machine: the last part, or the hub id whole."""
    return model if is_hub_id(model) else Path(model).resolve().name.removesuffix(".gguf")


def is_hub_id(model: str) -> bool:
    """Whether `model` reads as `owner/name` on the hub, and is no path that exists here."""
    reads_so = re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", model) and not model.endswith(".gguf")
    return bool(reads_so) and not Path(model).exists()


def _scheme(stages: Mapping[str, Mapping[str, Any] | None]) -> str:
    for name in ("quantize", "plan"):
        found = (stages[name] or {}).get("scheme")
        if found:
            return str(found)
    return "16 bit"


def _size_after(
    stages: Mapping[str, Mapping[str, Any] | None], report: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Bytes of the weights and bits a weight: as the report has them; before there is one, as
    allocate chose where it did, else as planned.
    """
    if report is not None:
        return {"after": report["bytes"]["after"], "bits": report["bits_per_weight"]}
    plan, chosen = stages["plan"], stages["allocate"]
    if plan is None:
        return {}
    if chosen is None:
        return {"after": plan["bytes"]["after"]["total"], "bits": plan["bits_per_weight"]["after"]}
    after = chosen["checkpoint_bytes"]
    return {"after": after, "bits": 8 * after / plan["parameters"]}


def _front_matter(recipe: str, model: str, scheme: str) -> str:
    """YAML by hand: every JSON string is a YAML string."""
    fields: dict[str, str | list[str]] = {"library_name": "transformers"}
    if is_hub_id(model):
        fields |= {"base_model": model, "base_model_relation": "quantized"}
    fields |= {
        "pipeline_tag": "text-generation",
        "quantization": scheme,
        "recipe": recipe,
        "tags": ["compressed-tensors", "quantized", scheme.split()[0].lower()],
    }
    return "\n".join(f"{name}: {json.dumps(value)}" for name, value in fields.items())


def _kinds(names: Iterable[str]) -> str:
    """The kinds of layer among `names`: `k_proj, q_proj and lm_head`."""
    return words.listed(dict.fromkeys(str(name).rsplit(".", 1)[-1] for name in names))


def _mixed_qkv(plan: Mapping[str, Any] | None) -> bool:
    """Whether v_proj is quantized while q_proj and k_proj are not.

    vLLM and SGLang fuse the three and refuse a checkpoint that mixes schemes among them.
    """
    quantized = {str(name).rsplit(".", 1)[-1] for name in (plan or {}).get("quantized", [])}
    return "v_proj" in quantized and "q_proj" not in quantized
