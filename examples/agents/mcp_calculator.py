"""An MCP server with one tool, a calculator. `--port N` serves HTTP on loopback, otherwise it speaks stdio."""

from __future__ import annotations

import argparse
import re

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("calculator")


@server.tool()
def calculate(expression: str) -> str:
    """The sum of numbers, e.g. 12+34."""
    if not re.fullmatch(r"\d{1,9}(\+\d{1,9})*", expression):
        raise ToolError("expected numbers with + between them")  # the text of other errors stays on the server
    return str(sum(int(number) for number in expression.split("+")))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    port = parser.parse_args().port
    if port:
        server.run("streamable-http", host="127.0.0.1", port=port, stateless_http=True, json_response=True)
    else:
        server.run("stdio")
