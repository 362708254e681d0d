"""The program `python -m thrifty`, which `torchrun -m thrifty` starts on every rank."""

from thrifty.core.child_python import leave_working_folder

leave_working_folder()

from thrifty.cli.main import main  # noqa: E402

main()
