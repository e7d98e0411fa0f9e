"""A batch of rows in, the same rows with texts out: the work of one worker of a batch job, whatever engine runs it.

Knows neither Ray nor files. A row that can't be answered comes back with its reason in `error`; the others are not held
up by it. What a worker can't do for any row, such as loading the artifact, is raised.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from infer.commands.options import token_ids
from infer.llm import LLM
from infer.output import RequestOutput, incomplete
from infer.params import SamplingParams
from infer.prompts import Record, prompt_row
from infer.structured_outputs import StructuredOutputsParams

ASKED = pa.schema(
    [
        ("number", pa.int64()),  # place in the input
        ("id", pa.string()),
        ("where", pa.string()),  # file and line, for errors
        ("fields", pa.string()),  # JSON of those of KEPT that the row has: rows of one file need not have one shape
    ]
)
KEPT = ("prompt", "turns", "messages", "sampling_params")

ANSWERED = pa.schema(
    [
        ("number", pa.int64()),
        ("id", pa.string()),
        ("text", pa.string()),  # null, as the three below, in a row that never ran
        ("token_ids", pa.list_(pa.int64())),
        ("num_tokens", pa.int64()),
        ("finish_reason", pa.string()),
        (
            "acceptance",  # one for each judge, from the first to the target; empty if nothing was drafted
            pa.list_(
                pa.struct(
                    [
                        ("tier", pa.string()),
                        ("num_drafts", pa.int64()),
                        ("num_draft_tokens", pa.int64()),
                        ("num_accepted", pa.int64()),
                        ("mean_acceptance_length", pa.float64()),
                    ]
                )
            ),
        ),
        ("error", pa.string()),  # null in a row that has its text
    ]
)

_FIELDS = tuple(field.name for field in dataclasses.fields(SamplingParams))
_FORM_FIELDS = tuple(field.name for field in dataclasses.fields(StructuredOutputsParams))


class Generator:
    """
    Args:
        artifact: as `LLM` takes it; loaded once, here.
        engine: `LLM`'s keyword arguments.
        sampling_params: of rows that say nothing else.
        raw: complete the text itself, without the chat template.
    """

    def __init__(self, artifact: str, engine: Mapping[str, Any], sampling_params: SamplingParams, raw: bool) -> None:
        self._llm = LLM(artifact, **engine)
        self._params, self._raw = sampling_params, raw

    def __call__(self, batch: pa.Table) -> pa.Table:
        """ASKED's columns in, ANSWERED's out; rows in the same order."""
        rows = batch.to_pylist()
        prompts, params, errors = dict[int, list[int]](), list[SamplingParams](), dict[int, str]()
        for row in rows:
            try:
                ids, own = self._prepare(row)
            except ValueError as error:
                errors[row["number"]] = str(error)
            else:
                prompts[row["number"]] = ids
                params.append(own)
        outputs = self._llm.generate(list(prompts.values()), params) if prompts else []
        by_number = dict(zip(prompts, outputs, strict=True))
        answers = [
            _failed(row, errors[number]) if (number := row["number"]) in errors else _answer(row, by_number[number])
            for row in rows
        ]
        return pa.Table.from_pylist(answers, ANSWERED)

    def _prepare(self, row: Mapping[str, Any]) -> tuple[list[int], SamplingParams]:
        """ValueError if the row has no prompt, or one that this model can't answer as it is asked to."""
        fields = json.loads(row["fields"])
        params = merged(self._params, fields.get("sampling_params"), row["where"])
        prompt = prompt_row(Record(row["id"], fields, row["where"], workload=""))
        ids = token_ids(self._llm, prompt, self._raw)
        self._llm.make_request(ids, params)  # refuses what `generate` would refuse together with the whole batch
        return ids, params


def merged(params: SamplingParams, own: object, where: str) -> SamplingParams:
    """`params` with a row's own values in their place; null, which Parquet has for "not given", changes nothing.

    Raises:
        ValueError: a value out of its range, or a field that there isn't.
    """
    if own is None:
        return params
    if not isinstance(own, Mapping):
        raise ValueError(f"{where}: sampling_params={own!r} must be an object, e.g. {{'temperature': 0.7}}")
    values = {name: value for name, value in own.items() if value is not None}
    _check_names("sampling_params", values, _FIELDS, where)
    if values.get("n", 1) != 1:
        raise ValueError(f"{where}: sampling_params.n={values['n']!r}: one row gives one text, repeat the row instead")
    form = values.get("structured_outputs")
    try:
        if isinstance(form, Mapping):
            form = {name: value for name, value in form.items() if value is not None}
            _check_names("structured_outputs", form, _FORM_FIELDS, where)
            values["structured_outputs"] = StructuredOutputsParams(**form)
        if isinstance(biases := values.get("logit_bias"), Mapping):  # JSON's keys are texts
            values["logit_bias"] = {int(token_id): bias for token_id, bias in biases.items()}
        return dataclasses.replace(params, **values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _check_names(what: str, values: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    if unknown := sorted(values.keys() - set(known)):
        raise ValueError(f"{where}: {what}.{unknown[0]} is unknown: give one of {', '.join(known)}")


def _failed(row: Mapping[str, Any], reason: str) -> dict[str, Any]:
    return {"number": row["number"], "id": row["id"], "acceptance": [], "error": reason}


def _answer(row: Mapping[str, Any], output: RequestOutput) -> dict[str, Any]:
    (text,) = output.outputs
    return {
        "number": row["number"],
        "id": row["id"],
        "text": text.text,
        "token_ids": list(text.token_ids),
        "num_tokens": len(text.token_ids),
        "finish_reason": text.finish_reason,
        "acceptance": [
            {
                "tier": tier.tier,
                "num_drafts": tier.num_drafts,
                "num_draft_tokens": tier.num_draft_tokens,
                "num_accepted": tier.num_accepted,
                "mean_acceptance_length": tier.mean_acceptance_length,
            }
            for tier in output.metrics.tiers
        ],
        "error": str(text.stop_reason) if incomplete(output) else None,
    }
