"""The log as one JSON object a line on stderr. Prompts and keys are in it only if somebody puts them there."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "facts", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def log_config(level: str = "INFO") -> dict[str, Any]:
    """For uvicorn, whose own line per request ours replaces."""
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"json": {"()": JsonFormatter}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "json"}},
        "loggers": {
            "infer": {"level": level, "handlers": ["stderr"], "propagate": False},
            "uvicorn": {"level": level, "handlers": ["stderr"], "propagate": False},
            "uvicorn.access": {"level": "WARNING"},
        },
    }
