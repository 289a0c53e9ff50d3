"""What the parameter server's checks ask a learner whose answer fails: a question that points at the fault, never the answer."""

from typing import Any

HINTS = {
    # the store
    "optimizer-gone": "The steps have no memory of the ones before. Where does velocity live between two calls?",
    "scale-store": "The step is too long or too short by a constant. If you add workers with the same total data, should the step change?",
    "each-applied": "How many optimizer steps is one call of `apply`, however many gradients it gets?",
    "first-only": "Some of the gradients that came are in no step. Which ones reach the optimizer?",
    "accumulated": "The second step still holds something of the first. What is in `.grad` before you write to it?",
    "values": "This is not what the optimizer makes of the mean. Which gradient does it see, for which name?",
    "version": "How many steps have been applied? Who counts them, and where does a reader see that?",
    "aliased-pull": "If a worker scribbles on what it pulled, who notices?",
    "aliased-later": "A worker's copy changed after it was pulled. Whose memory did it get?",
    "aliased-start": "The tensors that the store was made of changed with its steps, or it with them. Who owns the memory?",
    "aliased-gradient": "A gradient that a worker sent was written to. Into which tensor do you add up?",
    "kept-gradient": "A gradient was still read after the call that it was given to. What may its worker have written there by then?",
    "non-leaf": "What the store starts from may be a model's own Parameters. What does a clone of one still hang on?",
    "names": "A pull does not hold the names and shapes that the store was made of. What does a worker expect to find?",
    "graph": "What a worker pulls still knows how it was made. Does anyone want to backpropagate through a server?",
    # rules of a server
    "each-push": "How many optimizer steps are there in one round?",
    "early": "A step came before its round was over. Whose gradients are in when a round ends?",
    "never": "The gradients that end this round are there. Which line of yours looks whether they are enough, and when?",
    "once-lost": "This push was never applied. For which pushes is there a reason not to?",
    "missing": "Someone's gradient of this round is in no step. What happens to those that are there when a round ends?",
    "scale": "The shares in this step are not equal parts of one. What do you hand to `apply`, and what does it do with that?",
    "mixed": "A step is made of parts of several pushes. Which names belong together?",
    "twice": "The ack was lost and the push came again. Now?",
    "late": "This gradient belongs to a round that is over. What do the parameters look like that it was computed for?",
    "dropped": "Was that sample ever used? Who could tell, from what your server noted?",
    "answers-early": "This worker's gradient of the round is in. What would it compute with parameters that it has seen already?",
    "answers-dead": "Who is there to read this answer?",
    "unasked": "This worker has not asked. Which workers are waiting at this moment, by your notes?",
    "too-far": "How far ahead of the slowest is this worker, and does every worker's clock count in that?",
    "bound-off": "With bound 2, may a worker start when it is exactly 2 ahead?",
    "not-woken": "Who wakes the sleeper, and when?",
    "waits": "Who waits for whom here, and what is it waiting for?",
    "death-stuck": "Someone died. Who still waits for it, and who tells them?",
    "return": "A worker that was dead asks for parameters. What does it have to wait for?",
    "return-clock": "Which clock should a newcomer get, so that nobody waits for it and it is not ahead of anyone who works?",
    "news-twice": "What do you do with news that you have heard already?",
    "clock": "Which of its own pushes does a worker compute next? Which number do you tell it?",
    "staleness": "How many updates happened between reading and writing? Which two versions tell?",
    "staleness-missing": "What does your server note when it applies a push, and under which name?",
    "return-list": "What do `pull`, `push` and `death` return? The answers that leave now are all that the loop needs to know.",
    "apply-list": "What does `apply` take: a gradient, or a list of them?",
    # layers
    "half": "Could a reader see layer 1 of version 5 and layer 2 of version 6? When is a push all there?",
    "never-whole": "All layers of this push have arrived, and nobody got it. How do you know that it is whole?",
    "lives": "Half of this came from a worker that died, half from its next life. Were both computed with the same parameters?",
    "old-life": "A message of an earlier life came late. What may it do to what the new life has sent?",
    "old-layer": "A layer of an older push came in between. What may it do to what the newer one has gathered?",
    "confused": "These layers belong to different workers, or to different clocks. By what do you file what arrives?",
    "again-whole": "A layer arrived twice. How often is its push whole?",
    "hoards": "A half push whose worker is long gone on, or dead, is still in memory. Who will ever ask for it?",
    "layer-values": "A layer does not hold what was sent for it. By which name did it come?",
    # the worker
    "pull-first": "What does a worker know that has just been started, perhaps not for the first time?",
    "not-loaded": "Which parameters was this gradient computed with, and which were in the last answer?",
    "own-steps": "Which version did this gradient see? Who, besides the server, moves the worker's parameters?",
    "accumulates": "This gradient holds an earlier one. What was in `.grad` when backward began?",
    "velocity": "This gradient holds a part of an earlier one. Where does velocity live?",
    "wrong-clock": "Who knows which batch is next: the worker, or the server, which has seen what arrived?",
    "deadline": "How long is forever in a test?",
    "half-second": "An answer got lost. Who waits in the meantime, and for how long may this worker keep them waiting?",
    "returns": "A hook may not return anything. What does `box.send` return, and so what does your hook?",
    "ask-again": "The answer got lost. What does the worker do that would bring another?",
    "old-answer": "Two answers lay in the mailbox. Which of them is news?",
    "named-again": "The server names a batch that this worker has done already. What may have become of that push?",
    "after-backward": "Layer 3's gradient is ready before layer 2's. When does yours leave?",
    "twice-sent": "A layer of this push left twice. Which of your hooks is still there from before?",
    "lost-layer": "A layer of this push never left. Whose gradient was ready last?",
    "never-stops": "Who tells the worker that work is over, and where does yours look?",
    "message": "What does the server look for in a message? Compare with `words` in the cell above.",
    "sends-what": "What was sent for this layer is not its gradient. Which tensor do you hand to `send`, and when is it read?",
}


def on_error(error: dict[str, Any]) -> str | None:
    """A crash that has a typical cause."""
    kind, message = error["type"], error["message"]
    if kind == "ValueError" and "min()" in message or "empty sequence" in message:
        return "death-stuck"
    if kind in ("KeyError", "ValueError") and any(frame["function"] == "death" for frame in error["frames"]):
        return "news-twice"
    if kind == "KeyError" and message.strip("'").isdigit():
        return "return"
    if kind == "AttributeError" and "'NoneType' object has no attribute 'detach'" in message:
        return "twice-sent"
    if kind == "ValueError" and "non-leaf" in message:
        return "non-leaf"
    if kind == "TypeError" and "but hook returned" in message:
        return "returns"
    if kind == "RuntimeError" and "leaf" in message and "in-place" in message:
        return "graph"
    return None
