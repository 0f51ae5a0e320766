"""The light client: policies over a WebSocket. Never imports torch or the server."""
