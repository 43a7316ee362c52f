"""The arms of a comparison: what each mode adds to the server's command line and environment."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from sglang_dflash.errors import DFlashError

AR = "ar"
OURS = ("dflash", "adaptive")
_FORMS = (
    "ar, dflash:BLOCK, adaptive:BLOCK, builtin:BLOCK or mtp:STEPS, each with optional +NAME=VALUE environment variables"
)
_MODE = re.compile(r"(?:(?P<ar>ar)|(?P<kind>dflash|adaptive|builtin|mtp):(?P<size>\d+))(?P<env>(?:\+\w+=[^+]*)*)")
# Number of multi-token-prediction layers, as the published targets' config.json spell it
_MTP_KEYS = ("mtp_num_hidden_layers", "num_nextn_predict_layers")


@dataclass(frozen=True)
class Mode:
    """One arm.

    Attributes:
        label: as the user wrote it; the name of the arm in every result.
        kind: ``ar`` (no speculation), ``dflash`` (our worker, every block as wide), ``adaptive`` (its width chosen per
            step), ``builtin`` (SGLang's own DFLASH worker) or ``mtp``.
        size: widest block, number of draft steps of ``mtp``, 0 for ``ar``.
        env: environment variables of this arm's server.
    """

    label: str
    kind: str
    size: int = 0
    env: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Mode:
        """Read ``dflash:16`` or ``dflash:16+NAME=VALUE``.

        Raises:
            DFlashError: not a mode.
        """
        match = _MODE.fullmatch(text.strip())
        if match is None:
            raise DFlashError(f"mode {text!r}", expected=_FORMS, remedy="for example --modes ar,dflash:8,dflash:16")
        env = tuple(
            (name, value) for name, _, value in (pair.partition("=") for pair in match["env"].split("+") if pair)
        )
        return cls(text.strip(), match["ar"] or match["kind"], int(match["size"] or 0), env)

    @property
    def block(self) -> int | None:
        """Tokens verified per step: the drafted ones and the anchor; None without speculation."""
        return {"ar": None, "mtp": self.size + 1}.get(self.kind, self.size)

    def server_args(self, target: str, drafter: str | None) -> list[str]:
        """Arguments that this arm adds to ``python -m sglang.launch_server --model-path TARGET``.

        Raises:
            DFlashError: the arm needs a drafter and there is none, or the target has no MTP layers.
        """
        if self.kind == AR:
            return []
        if self.kind == "mtp":
            _require_mtp(target)
            return [
                "--speculative-algorithm", "NEXTN", "--speculative-num-steps", str(self.size),
                "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", str(self.size + 1),
            ]  # fmt: skip
        if drafter is None:
            raise DFlashError(
                f"mode {self.label} without a drafter", expected="--pair, or --draft PATH", remedy="name the drafter"
            )
        return [
            "--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", drafter,
            "--speculative-dflash-block-size", str(self.size),
            *(("--speculative-adaptive",) if self.kind == "adaptive" else ()),
        ]  # fmt: skip

    def server_env(self) -> dict[str, str]:
        return ({"SGLANG_DFLASH": "builtin"} if self.kind == "builtin" else {}) | dict(self.env)


def parse_modes(text: str) -> list[Mode]:
    """Read the comma-separated list of ``--modes``; an arm named twice is refused."""
    modes = [Mode.parse(part) for part in text.split(",")]
    labels = [mode.label for mode in modes]
    repeated = sorted({label for label in labels if labels.count(label) > 1})
    if repeated:
        raise DFlashError(f"modes named twice: {', '.join(repeated)}", expected="each arm once", remedy="drop one")
    return modes


def _require_mtp(target: str) -> None:
    """Refuse a local target without MTP layers now; of a target on a hub the server will tell."""
    path = Path(target) / "config.json"
    if not path.exists():
        return
    config = json.loads(path.read_text())
    text_config = config.get("text_config", {})
    if not any(config.get(key) or text_config.get(key) for key in _MTP_KEYS):
        raise DFlashError(
            f"mode mtp on {target}",
            expected=f"a target with multi-token-prediction layers ({' or '.join(_MTP_KEYS)} in its config.json)",
            remedy="leave mtp out of --modes",
        )
