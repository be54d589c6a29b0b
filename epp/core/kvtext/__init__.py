"""From a prompt's text to what each engine holds of it, without a tokenizer.

A vLLM of 0.30 or later copies the `X-Session-ID` of a request into the events of the blocks it
stores. So each request carries a fresh random id, and the events say which chain of blocks its text
became. Later requests that share text with it share the beginning of that chain; how many tokens of
it is known exactly where a prompt ended, and nearly so where two prompts were seen to part.

- `view`: a request's text in pieces, and the fields that set it apart
- `path`: the text as a chain of hashes, one per 128 bytes
- `tree`: which texts are remembered, and the chain of blocks each one became
- `habits`: what templates do: bytes per token, tokens that a continuation does not keep
- `sent`: requests whose events may still come, and which endpoints name them
- `index`: `TextIndex`, the one that others use
"""
