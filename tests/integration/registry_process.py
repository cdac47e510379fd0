"""A registry in a process of its own, that can be killed and started again on the same port."""

import contextlib
import os
import signal

import anyio


def be_registry(listen, pipe):
    """Be a child process: a registry, until it is killed or its parent is gone."""
    import petals_async

    async def main():
        async with petals_async.Registry(listen) as registry:
            pipe.send(registry.address)
            with contextlib.suppress(EOFError, OSError):
                await anyio.wait_readable(pipe)

    os.setsid()
    anyio.run(main)


class RegistryProcess:
    """Starts a registry, kills it, and starts it again at its old address. All calls are short and synchronous."""

    def __init__(self, context):
        self._context = context
        self._process = None
        self._pipe = None
        self.address = "127.0.0.1:0"

    def start(self):
        self._pipe, theirs = self._context.Pipe(duplex=True)
        self._process = self._context.Process(target=be_registry, args=(self.address, theirs))
        self._process.start()
        theirs.close()
        self.address = self._pipe.recv()

    def kill(self):
        if self._process is not None and self._process.is_alive():
            os.kill(self._process.pid, signal.SIGKILL)
            self._process.join()
        if self._pipe is not None:
            self._pipe.close()
