"""POST /load_model of transformers' server, which `transformers chat` asks before it begins. The model is loaded."""

import json
from typing import Any

from fastapi.responses import Response

from .errors import Refusal
from .fields import TEXT, check_fields
from .handlers import Chat


class LoadModel(Chat):
    """Answers with the last event of a load: the one model is ready, or another cannot be loaded."""

    required, generates = "model", False

    def _read(self, body: dict) -> dict:
        return check_fields(body, {"model": TEXT}, "model")

    def _check(self, body: dict) -> dict:
        return body

    async def handle_request(self, body: dict, request_id: str) -> Any:
        """A stream of one event, in the form of transformers."""
        event = {"status": "ready", "model": body["model"], "cached": True}
        try:
            self._check_model(body)
        except Refusal as refusal:
            event = {"status": "error", "model": body["model"], "message": refusal.detail}
        return Response(f"data: {json.dumps(event)}\n\n", media_type="text/event-stream")
