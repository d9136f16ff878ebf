"""The hand-off of a prompt's records from a prefill worker to a decode worker.

The primitives of one hand-off, by the process that runs them, in the order of their use. [r] marks
those that are calls to another process.

Router: owns the reservation. It reserves right before it submits the prompt, and it aborts.
    reserve [r]   room for a prompt on the decode worker; answers a nonce     Reservations.reserve
    submit  [r]   the prompt and the nonce to the prefill worker              PrefillSide.start
    abort   [r]   free all that an attempt holds, on both workers              Reservations.abort
    fence   [r]   begin the next epoch of a worker; drop all of the old one   Reservations.fence

Prefill worker, on the engine's thread: never blocks.
    begin         the records are allocated and can be read                   OutgoingHandoff.begin
    has           whether the receiver has an item: then it is not encoded    OutgoingHandoff.has
    offer         the bytes of these items are final                          OutgoingHandoff.offer
    stage         copy items from a device to the host                        ArenaSource.stage

Prefill worker, on the io loop: a Sender for each part of a hand-off, a Channel to each rank that
receives. A worker of one rank hands over to another such in one part; see `partition.py`.
    send    [r]   rank 0 to its followers: begin to send your parts           FollowerHandler.send
    attach  [r]   take a part over; answers the items that arrived            Sender.run
    push          items into the queue of the hand-off                        Sender.offer
    next_frame    pack the next items, as credit allows                       SendQueue.next_frame
    renew   [r]   keep the leases of all hand-offs of a channel               Channel
    restart       after a cut stream: attach again, send missing items        SendQueue.restart
    commit  [r]   the digests of all items and the first token                Sender.finish
    end           give the attachment up with an error                        Sender.end
    finish  [r]   rank 0 to its followers: commit your parts                  FollowerHandler.finish
    stop    [r]   rank 0 to its followers: read no more of these records      FollowerHandler.stop

Decode worker, rank 0, on the io loop: Receiver, around the rules in Reservations.
    reserve       allocate records; reuse cached blocks of the same prefix    PrefixCache.hold
    open    [r]   tell followers where their parts will lie, before a grant   Followers.open
    attach        move a part to a new attachment; ask the rank that has it   Receiver.attach
    store         verify a frame, copy its items, grant credit                Reservations.store
    renew         extend the lease                                            Reservations.renew
    expire        end reservations whose lease is over                        Reservations.expire
    check   [r]   at the commit of a follower's part: is it complete there    Followers.check
    admit         at the last commit: the engine owns the records             Reservations.commit
    keep          cache the blocks of an admitted prompt under their keys     PrefixCache.keep
    scrub         verify cached blocks; drop damaged ones                     Receiver.scrub
    digests [r]   of the same blocks in the arenas of followers               Followers.digests
    close   [r]   followers write nothing of an ended reservation any more    Followers.close
    release       then free its records                                       PrefixCache.release

Decode worker, followers, on their io loops: PageReceiver, around the rules in FollowerParts.
    open          zero what no item covers; expect the parts of these heads   FollowerParts.open
    store         verify a frame that a sender sent straight here, copy it    FollowerParts.store
    check         compare what arrived with the digests of a commit           FollowerParts.check
    close         forget the parts of a reservation                           FollowerParts.close

Each file knows one thing: messages (plain data and protobuf), records (items and their addresses),
partition (which heads go from which rank to which), sender, channel and direct (sending),
reservations, receiver, incoming and prefix_cache (receiving), control (a worker as its router calls
it), follower_calls (a follower as its rank 0 calls it), rpc, link and security (transport), stats
(what it cost).
"""
