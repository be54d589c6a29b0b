"""Generated protobuf code, the tests' oracle; `protos/README.md` says how to generate it."""
