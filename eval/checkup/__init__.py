"""What `eval/doctor.py` looks at, one module a part: a head's files, its config, its tensors, its maps, its target, its acceptance."""
