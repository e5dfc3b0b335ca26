"""An engine whose second replica samples at another temperature than it was asked to, as a wrong configuration would
have it. It reports the logprobs of what it does."""

from dataclasses import replace

from asyncrl.rollouter.engines.native.engine import NativeEngine
from asyncrl.rollouter.engines.native.spec import NativeSpec


class HotEngine(NativeEngine):
    async def submit(self, requests):
        await super().submit([r._replace(sampling=replace(r.sampling, temperature=0.2)) for r in requests])


class Spec(NativeSpec):
    async def start(self, config, recorder):
        make = HotEngine if recorder.actor == "replica/1" else NativeEngine
        return make(config.model.path, config.rollout.engine, recorder=recorder)


ENGINE = Spec()
