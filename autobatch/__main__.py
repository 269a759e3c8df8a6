"""`python -m autobatch`: the command, where its script is not on the path."""

from autobatch._cli import main

main(prog_name="autobatch")
