"""`python -m lathe`: the command line."""

from lathe.server.cli.app import app

if __name__ == "__main__":
    app(prog_name="lathe")
