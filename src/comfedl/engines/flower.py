"""The old name of ``comfedl.flower``, kept for apps that version 0.1 wrote."""

from __future__ import annotations

from typing import Any

from comfedl import flower


def __getattr__(name: str) -> Any:
    return getattr(flower, name)
