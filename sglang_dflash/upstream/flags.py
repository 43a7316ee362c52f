"""SGLang names for ``sglang-dflash check`` alone: a server starts without them."""

from sglang.srt.arg_groups.fields.observability import Observability
from sglang.srt.arg_groups.fields.serving import Serving
from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger, yaml

__all__ = ["ConfigArgumentMerger", "Observability", "Serving", "yaml"]
