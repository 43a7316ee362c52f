"""A plugin replaces the worker class of a builtin algorithm, on every platform."""

from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm


class Worker:
    pass


register = getattr(SpeculativeAlgorithm, "register_worker", SpeculativeAlgorithm.register)
try:
    register("DFLASH")(lambda server_args: Worker)
except ValueError as error:
    raise AssertionError(error) from error
assert SpeculativeAlgorithm.DFLASH.create_worker(ServerArgs(model_path="model")) is Worker
