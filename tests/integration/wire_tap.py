"""A tap on the wire: an `abc.Connector` around the real one that tells of each message before and after it.

So a test acts at one exact point of a generation ("right after this step was sent"), with real gRPC underneath and
without a sleep. A hook is awaited by whoever sends or reads, and may take its time.
"""

from contextlib import asynccontextmanager

from petals_async.rpc.block_channel import GrpcConnector


async def nothing(_address, _message):
    """Be no hook."""


class WireTap:
    """A connector to be given to `Client(connector=...)`.

    Attributes:
        before_send, after_send: Awaited with (address, message) around each message to a server.
        on_receive: Awaited with (address, message) for each message of a server, before the client has it.
        sent: All messages sent, as (address, message).
        deaf: Addresses whose messages are swallowed from now on, until their stream ends: what a server that dies
            while it computes would never have sent.
    """

    def __init__(self, *, before_send=nothing, after_send=nothing, on_receive=nothing):
        self._inner = GrpcConnector()
        self.before_send = before_send
        self.after_send = after_send
        self.on_receive = on_receive
        self.sent = []
        self.deaf = set()

    @asynccontextmanager
    async def connect(self, address):
        async with self._inner.connect(address) as channel:
            yield _Channel(self, channel)


class _Channel:
    def __init__(self, tap, inner):
        self._tap = tap
        self._inner = inner

    @property
    def address(self):
        return self._inner.address

    async def get_server_info(self):
        return await self._inner.get_server_info()

    async def close_session(self, session_id):
        await self._inner.close_session(session_id)

    async def list_sessions(self):
        return await self._inner.list_sessions()

    @asynccontextmanager
    async def open_stream(self):
        async with self._inner.open_stream() as stream:
            yield _Stream(self._tap, self._inner.address, stream)


class _Stream:
    def __init__(self, tap, address, inner):
        self._tap = tap
        self._address = address
        self._inner = inner

    async def send(self, message):
        await self._tap.before_send(self._address, message)
        await self._inner.send(message)
        self._tap.sent.append((self._address, message))
        await self._tap.after_send(self._address, message)

    async def receive(self):
        while True:
            message = await self._inner.receive()
            if self._address not in self._tap.deaf:
                await self._tap.on_receive(self._address, message)
                return message
