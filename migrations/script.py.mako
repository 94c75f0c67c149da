"""${message}.

Revision ${up_revision}, after ${down_revision | comma,n}.
"""

import sqlalchemy as sa
from alembic import op
${imports if imports else ""}
revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
branch_labels = ${repr(branch_labels)}
depends_on = ${repr(depends_on)}


def upgrade() -> None:
    """To ${up_revision}."""
    ${upgrades if upgrades else "pass"}


def downgrade() -> None:
    """Never: an older release does not touch a newer store, and the backup made before an upgrade is the way back."""
    raise NotImplementedError("restore the backup that was made before the upgrade")
