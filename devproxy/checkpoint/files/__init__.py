# SPDX-License-Identifier: Apache-2.0
"""Files that the job changed: which, what they held at the cut, and how they are put back at a restore.

libdevproxy_host.so (csrc/hostlib) writes a line into `<job folder>/files.journal` before a process of the job makes,
changes, renames or removes a file. tracker.FilesTracker reads it, stores the files' content while the tree is frozen, and
puts it back before CRIU restores the tree:

- A file of the image gets the content, mode, owner and time of the cut (CRIU refuses an open file of another size).
- A file that the job made after the cut goes; one that it first changed after the cut comes back from the copy that the
  library made before the change (`<state>/jobs/<job>.undo`, only once there is an image).
- A file that somebody else changed meanwhile is kept beside it as `<name>.devproxy-kept-<UTC>`, and a line says so.
  Somebody else: the file differs from what note_state() saw last, later than the job can have lived; or FanotifyWatch saw
  the writer. What changed in the last moments of a job that was killed together with us can be either's: it is put back,
  and what it replaces goes to `<state>/jobs/<job>.replaced/`.
- Shared file systems, files above the limit, devices and FIFOs are listed, not rolled back.

A crash in the middle leaves each file old or new, never half; put_back may simply run again.

    tracker     the files of one job: what the supervisor and a restore call
    journal     the lines of the library            known      what they and the looks add up to, kept in the state folder
    opened      files that the tree has open        watch      writers, as fanotify sees them
    undo        copies from before a change         mounts     shared file systems
    cut         the content, into the staging folder
    plan        what a restore has to change        owner      whose version is there now, and where it is kept
    put_back    a restore's changes                 places     its folders, by descriptors
    records     one file at the cut                 look, copying   stat and bytes
    leases      files that another may not open     xattrs   extended attributes and ACLs
"""
