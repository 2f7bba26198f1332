"""`python -m lockstep_kv`: the command line."""

from lockstep_kv.cli import main

main()
