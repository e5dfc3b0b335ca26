"""The built-in agent with tools: python, shell, file edits, a calculator, and those of MCP servers."""
