"""The nouns of Thrifty. Imports torch and the standard library, nothing else of ours."""
