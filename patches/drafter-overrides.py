"""`--json-model-override-args` is the target's: a drafter with its own layers does not get it."""

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.server_args import ServerArgs

given = {}
ModelConfig.__init__ = lambda self, **keywords: given.update(keywords)
args = ServerArgs(model_path="target", json_model_override_args='{"max_position_embeddings": 131072}')
ModelConfig.from_server_args(args, model_path="drafter", is_draft_model=True)
assert given["model_override_args"] == "{}", given["model_override_args"]
ModelConfig.from_server_args(args)
assert given["model_override_args"] == args.json_model_override_args
