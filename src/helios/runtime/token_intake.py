"""What a new token does to its sequence: text, end tokens and stop strings, grammar, thinking budget.

Plain Python over one sequence at a time. The engine decides which tokens come, and ends the sequences that
this says are over.
"""

from __future__ import annotations

from helios.runtime.detokenizer import Detokenizer, Vocabulary
from helios.runtime.grammar import CompiledGrammar, GrammarMatcher
from helios.runtime.request import FinishReason, Sequence, TokenEvent, TokenLogprob


class TokenIntake:
    """Takes sampled tokens into sequences.

    ``eos_token_ids`` end a sequence; ``end_thinking_ids`` are written when a thinking budget is used up.
    """

    def __init__(
        self, vocabulary: Vocabulary, eos_token_ids: frozenset[int], end_thinking_ids: tuple[int, ...]
    ) -> None:
        self._vocabulary = vocabulary
        self._eos_token_ids = eos_token_ids
        self._end_thinking_ids = end_thinking_ids
        self._think_ids = {
            vocabulary.marker_ids.get(name, -1): name == "<think>" for name in ("<think>", "</think>")
        }

    def begin(self, sequence: Sequence, compiled: CompiledGrammar | None) -> None:
        """Prepare a sequence for its first token; one that was put back goes on where it was."""
        if sequence.detokenizer is not None:
            return
        params = sequence.job.params
        sequence.detokenizer = Detokenizer(
            self._vocabulary,
            params.stop,
            include_stop=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            min_tokens=params.min_tokens,
        )
        if compiled is not None and params.grammar is not None:
            sequence.grammar = compiled.matcher(params.grammar.starts_after)
        if params.thinking_budget is not None:
            self._find_thinking(sequence, params.thinking_budget)

    def add(self, sequence: Sequence, token_id: int, logprob: TokenLogprob | None, now: float) -> TokenEvent:
        """Add one sampled token. The event's finish reason says whether the sequence is over with it."""
        job, params = sequence.job, sequence.job.params
        sequence.token_ids.append(token_id)
        if sequence.forced:
            sequence.forced.pop()
        if params.thinking_budget is not None:
            self._watch_thinking(sequence, token_id, params.thinking_budget)
        timings = job.timings
        if not timings.first_token:
            timings.first_token = now
        timings.last_token = now
        detokenizer = sequence.detokenizer
        assert detokenizer is not None
        reason: FinishReason | None = None
        text = ""
        # A finished grammar allows nothing but an end token, so there min_tokens does not count.
        enough = params.grammar is not None or sequence.num_output_tokens > params.min_tokens
        stop_token = token_id in params.stop_token_ids
        if enough and (stop_token or (token_id in self._eos_token_ids and not params.ignore_eos)):
            reason = FinishReason.STOP
            if stop_token:
                sequence.stop_match = token_id
                if params.include_stop_str_in_output:
                    text, _ = detokenizer.push(token_id)
        else:
            text, match = detokenizer.push(token_id)
            if match is not None:
                reason, sequence.stop_match = FinishReason.STOP, match
            elif sequence.grammar is not None and _completes(sequence.grammar, token_id):
                reason = FinishReason.STOP
            elif sequence.num_output_tokens >= job.max_tokens:
                reason = FinishReason.LENGTH
        if reason is not None and not isinstance(sequence.stop_match, str):
            text += detokenizer.flush()
        logprobs = None if logprob is None else [logprob]
        event = TokenEvent(
            job, sequence.index, [token_id], text, detokenizer.take_markers(), logprobs, reason
        )
        event.stop_match = sequence.stop_match
        return event

    def _find_thinking(self, sequence: Sequence, budget: int) -> None:
        """A prompt may end inside a thinking block: then its budget runs from the first token."""
        last = next((token for token in reversed(sequence.token_ids) if token in self._think_ids), None)
        if last is not None and self._think_ids[last]:
            sequence.thinking_tokens = 0
            if budget == 0:
                sequence.forced = list(reversed(self._end_thinking_ids))

    def _watch_thinking(self, sequence: Sequence, token_id: int, budget: int) -> None:
        """Count tokens of thinking; when the budget is used up, write its end instead of sampling."""
        opens = self._think_ids.get(token_id)
        if opens is not None:
            sequence.thinking_tokens = 0 if opens else -1
        elif sequence.thinking_tokens >= 0:
            sequence.thinking_tokens += 1
        if sequence.thinking_tokens >= budget and not sequence.forced:
            sequence.forced = list(reversed(self._end_thinking_ids))


def _completes(grammar: GrammarMatcher, token_id: int) -> bool:
    """True when nothing but an end token could follow: no forward is spent on that."""
    grammar.accept(token_id)
    return grammar.is_finished
